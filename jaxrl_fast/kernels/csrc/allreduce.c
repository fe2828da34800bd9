/* The sum of arrays over the cores of one CPU: each core is a device of JAX's, and all are in this process.

XLA's own sum lets threads sleep and be woken, which takes some 50 microseconds. Here a core that is early looks again
and again until the others are there: less than one microsecond, and what the memory takes. All add in the order of the
cores and so have the same bits: of few cores each adds up the whole array, of many each a slice that the others copy.

Called by `across.total`, compiled by `native.py`. Calls must come in the same order on every core, one at a time.
*/

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "ffi.h"

enum { MOST_CORES = 1024, MOST_SIZES = 32, FEW = 4, LINE = 16 /* floats */ };
enum { LOOKS = 100, YIELDS = 2000, NAP_NS = 50000 }; /* looks, then offers of the core to others, then naps */
#ifndef PATIENCE_S
#define PATIENCE_S 100 /* of naps; XLA's is 40, and then it aborts the process */
#endif

/* A time is the number of a program's run, in the upper half, and of the sum in it. Runs are numbered in no order, and
jaxlib 0.7 numbers those of two programs on the same devices alike. */
typedef _Atomic(uint64_t) Time;
typedef struct {
    _Alignas(128) Time ready;  /* its arrays can be read */
    Time summed;               /* its slices of the results are there */
    Time done;                 /* what others have can be overwritten, for all that this core cares */
    XLA_FFI_CallFrame *call;
    uint64_t now;
} Core;

/* Groups of a size have places of their own: all cores of a group have then been through the same sums there, and count
alike also where two runs have one number. */
static Core all_cores[MOST_SIZES][MOST_CORES];
static _Atomic(int) sizes[MOST_SIZES];

/* The places of groups of so many; NULL where there are too many sizes. */
static Core *places(int num) {
    for (int i = 0; i < MOST_SIZES; ++i) {
        int taken = 0;
        if (atomic_compare_exchange_strong(&sizes[i], &taken, num) || taken == num) return all_cores[i];
    }
    return NULL;
}

/* Whether another core has come to `now`; not if it never does, for its program has failed.

Naps are counted and not time, which goes by while the process is halted, too. */
static int await(Time *others, uint64_t now) {
    for (long looks = 0;; ++looks) {
        uint64_t then = atomic_load_explicit(others, memory_order_acquire);
        if (then >> 32 == now >> 32 && then >= now) return 1;
        if (looks < LOOKS) {
            rest();
        } else if (looks < LOOKS + YIELDS) {
            sched_yield();
        } else if (looks < LOOKS + YIELDS + PATIENCE_S * (1000000000L / NAP_NS)) {
            nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        } else {
            return 0;
        }
    }
}

static int await_all(Core *cores, int num, size_t what, uint64_t now) {
    for (int i = 0; i < num; ++i)
        if (!await((Time *)((char *)&cores[i] + what), now)) return 0;
    return 1;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* What a core has of array i: after the first argument come the arrays. Results are their sums, or one result is, which
has one after another. */
static int64_t num_arrays(const Core *core) { return core->call->args.size - 1; }
static size_t size_of(const Core *core, int64_t i) { return (size_t)count(argument(core->call, i + 1), 0); }
static const float *in(const Core *core, int64_t i) { return argument(core->call, i + 1)->data; }
static float *out(const Core *core, int64_t i, size_t before) {
    return core->call->rets.size == 1 ? (float *)result(core->call, 0)->data + before : result(core->call, i)->data;
}

static int alike(const Core *one, const Core *other) {
    if (num_arrays(one) != num_arrays(other)) return 0;
    for (int64_t i = 0; i < num_arrays(one); ++i)
        if (size_of(one, i) != size_of(other, i)) return 0;
    return 1;
}

/* Elements [first, end) of array i, in the order of the cores. */
static void add(const Core *cores, int num, int64_t i, float *restrict sum, size_t first, size_t end) {
    const float *restrict a = in(&cores[0], i), *restrict b = in(&cores[num > 1], i);
    for (size_t j = first; j < end; ++j) sum[j] = num > 1 ? a[j] + b[j] : a[j];
    for (int core = 2; core < num; ++core) {
        const float *restrict next = in(&cores[core], i);
        for (size_t j = first; j < end; ++j) sum[j] += next[j];
    }
}

/* The first element of a core's slice of so many; that of the next one is where it ends. */
static size_t slice(int core, int num, size_t size) {
    size_t lines = (size + num * LINE - 1) / (num * LINE);
    return least(core * lines * LINE, size);
}

static XLA_FFI_Error *failed(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
    return api->XLA_FFI_Error_Create(&args);
}

/* Arguments: how many cores sum, int32 [], and arrays f32 [...]. Results: their sums, or one f32 [all elements]. */
XLA_FFI_Error *sum_over_cores(XLA_FFI_CallFrame *call) {
    if (is_question(call)) return NULL;
    XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
    XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
    XLA_FFI_Error *error = call->api->XLA_FFI_RunId_Get(&run);
    if (!error) error = call->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (error) return error;

    int num = *(int32_t *)argument(call, 0)->data;
    Core *all = places(num);
    if (!all || device.device_ordinal < 0 || device.device_ordinal >= MOST_CORES)
        return failed(call->api, XLA_FFI_Error_Code_OUT_OF_RANGE, "more cores than cores.c has places for");
    int mine = device.device_ordinal % num;
    Core *cores = &all[device.device_ordinal - mine], *me = &cores[mine];

    uint64_t first_now = (uint64_t)run.run_id << 32 | 1;
    uint64_t now = me->now >> 32 == first_now >> 32 ? me->now + 1 : first_now;
    me->now = now;
    me->call = call;
    atomic_store_explicit(&me->ready, now, memory_order_release);

    if (!await_all(cores, num, offsetof(Core, ready), now)) goto alone;
    for (int core = 0; core < num; ++core)
        if (!alike(me, &cores[core])) goto confused;
    const int64_t num_sums = num_arrays(me);
    size_t before = 0;
    for (int64_t i = 0, size; i < num_sums; ++i, before += size) {
        size = size_of(me, i);
        if (num <= FEW) add(cores, num, i, out(me, i, before), 0, size);
        else add(cores, num, i, out(me, i, before), slice(mine, num, size), slice(mine + 1, num, size));
    }
    if (num > FEW) {
        atomic_store_explicit(&me->summed, now, memory_order_release);
        if (!await_all(cores, num, offsetof(Core, summed), now)) goto alone;
        before = 0;
        for (int64_t i = 0, size; i < num_sums; ++i, before += size) {
            size = size_of(me, i);
            for (int core = 0; core < num; ++core) {
                size_t first = slice(core, num, size), end = slice(core + 1, num, size);
                float *to = out(me, i, before) + first, *from = out(&cores[core], i, before) + first;
                if (core != mine && first < end) memcpy(to, from, (end - first) * sizeof(float));
            }
        }
    }
    atomic_store_explicit(&me->done, now, memory_order_release);

    if (!await_all(cores, num, offsetof(Core, done), now)) goto alone;
    return NULL;
confused: /* all are, and each reads what the others have before it goes */
    atomic_store_explicit(&me->done, now, memory_order_release);
    if (!await_all(cores, num, offsetof(Core, done), now)) goto alone;
    return failed(call->api, XLA_FFI_Error_Code_INTERNAL, "cores do not sum the same arrays: in another order?");
alone:
    return failed(call->api, XLA_FFI_Error_Code_ABORTED, "a device waits for another one, whose program has failed");
}
