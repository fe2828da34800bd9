/* The sum of an array over the cores of one CPU: each core is a device of JAX's, and all are in this process.

XLA's own sum lets threads sleep and be woken, which takes some 50 microseconds. Here a core that is early looks again
and again until the others are there: less than one microsecond, and what the memory takes. All add in the order of the
cores and so have the same bits: of few cores each adds up the whole array, of many each a slice that the others copy.

Called by `across.total`, compiled by `cores.py`. Calls must come in the same order on every core, one at a time.
*/

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "xla/ffi/api/c_api.h"

enum { MOST_CORES = 1024, FEW = 4, LINE = 16 /* floats */ };
enum { LOOKS = 100, YIELDS = 2000, NAP_NS = 50000 }; /* looks, then offers of the core to others, then naps */
#ifndef PATIENCE_S
#define PATIENCE_S 100 /* of naps; XLA's is 40, and then it aborts the process */
#endif

/* A time is the number of a program's run, in the upper half, and of the sum in it. Runs are numbered in no order. */
typedef _Atomic(uint64_t) Time;
typedef struct {
    _Alignas(128) Time ready;  /* `in` can be read */
    Time summed;               /* its slice of `out` is there */
    Time done;                 /* what others have can be overwritten, for all that this core cares */
    const float *in;
    float *out;
    size_t size;
    uint64_t now;
} Core;

static Core all_cores[MOST_CORES];

static void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
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

/* Elements [first, end), in the order of the cores. */
static void add(const Core *cores, int num, float *restrict out, size_t first, size_t end) {
    const float *restrict a = cores[0].in, *restrict b = cores[num > 1].in;
    for (size_t i = first; i < end; ++i) out[i] = num > 1 ? a[i] + b[i] : a[i];
    for (int core = 2; core < num; ++core) {
        const float *restrict in = cores[core].in;
        for (size_t i = first; i < end; ++i) out[i] += in[i];
    }
}

static XLA_FFI_Error *failed(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
    return api->XLA_FFI_Error_Create(&args);
}

/* Arguments: the array f32 [...], and how many cores share it, int32 []. Result: the sum. */
XLA_FFI_Error *sum_over_cores(XLA_FFI_CallFrame *call) {
    const XLA_FFI_Extension_Base *extension = call->extension_start;
    if (extension && extension->type == XLA_FFI_Extension_Metadata) { /* XLA asks what this is */
        XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
        metadata->api_version.major_version = XLA_FFI_API_MAJOR;
        metadata->api_version.minor_version = XLA_FFI_API_MINOR;
        return NULL;
    }
    XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
    XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
    XLA_FFI_Error *error = call->api->XLA_FFI_RunId_Get(&run);
    if (!error) error = call->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (error) return error;

    const XLA_FFI_Buffer *x = call->args.args[0], *sum = call->rets.rets[0];
    int num = *(int32_t *)((XLA_FFI_Buffer *)call->args.args[1])->data;
    if (device.device_ordinal < 0 || device.device_ordinal >= MOST_CORES)
        return failed(call->api, XLA_FFI_Error_Code_OUT_OF_RANGE, "more cores than cores.c has places for");
    int mine = device.device_ordinal % num;
    Core *cores = &all_cores[device.device_ordinal - mine], *me = &cores[mine];

    me->size = 1;
    for (int64_t i = 0; i < x->rank; ++i) me->size *= (size_t)x->dims[i];
    const size_t size = me->size, slice = (size + num * LINE - 1) / (num * LINE) * LINE;

    uint64_t first_now = (uint64_t)run.run_id << 32 | 1;
    uint64_t now = me->now >> 32 == first_now >> 32 ? me->now + 1 : first_now;
    me->now = now;
    me->in = x->data;
    me->out = sum->data;
    atomic_store_explicit(&me->ready, now, memory_order_release);

    if (!await_all(cores, num, offsetof(Core, ready), now)) goto alone;
    for (int core = 0; core < num; ++core)
        if (cores[core].size != size) goto confused;
    if (num <= FEW) {
        add(cores, num, me->out, 0, size);
    } else {
        add(cores, num, me->out, mine * slice, least((mine + 1) * slice, size));
        atomic_store_explicit(&me->summed, now, memory_order_release);
        if (!await_all(cores, num, offsetof(Core, summed), now)) goto alone;
        for (int core = 0; core < num; ++core) {
            size_t first = core * slice, end = least(first + slice, size);
            if (core != mine && first < end)
                memcpy(me->out + first, cores[core].out + first, (end - first) * sizeof(float));
        }
    }
    atomic_store_explicit(&me->done, now, memory_order_release);

    if (!await_all(cores, num, offsetof(Core, done), now)) goto alone;
    return NULL;
confused:
    return failed(call->api, XLA_FFI_Error_Code_INTERNAL, "cores do not sum the same array: in another order?");
alone:
    return failed(call->api, XLA_FFI_Error_Code_ABORTED, "a device waits for another one, whose program has failed");
}
