/* Sum arrays over the cores of one CPU, or copy those of the first core to all. Each core is a JAX device, and all of them
belong to this process.

XLA's own sum puts threads to sleep and wakes them, which takes about 50 microseconds. Here an early core spins until
the others arrive: less than one microsecond, plus the time of memory access. A core that waits longer sleeps: another
program has the core of the one that it waits for. After several such waits it sleeps early for a while, because spinning
takes time from the others and from its own time slice. It never yields, for that would give away a whole time slice.

All cores add in the order of the cores, so they get the same bits. With up to MAX_WHOLE_SUMS cores, each sums whole
arrays; with more, each sums a slice, which the others copy.

allreduce.py calls this function, build.py compiles it. Calls must come in the same order on every core, one at a time.
*/

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "ffi.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MAX_CORES = 1024, MAX_SIZES = 32, MAX_WHOLE_SUMS = 4, LINE = 16 /* floats */ };
enum { SPINS = 30000, FEW_SPINS = 200, SLEEP_NS = 1000000 }; /* polls, then sleeps, each until another core arrives */
enum { SAMPLE = 128, SHARED = 35, MAX_HOLD = 256 }; /* sums between two looks at the load; percent; looks */
#ifndef TIMEOUT_S
#define TIMEOUT_S 100 /* seconds of sleep; XLA aborts the process after 40 */
#endif

/* A ticket is a program run's number, in the upper half, and the sum's number in that run. Runs are not numbered in
order, and jaxlib 0.7 gives runs of two programs on the same devices the same number. */
typedef _Atomic(uint64_t) Ticket;
typedef struct {
    _Alignas(128) Ticket ready;  /* the core's arrays can be read */
    Ticket summed;               /* the core's slices of the results can be read */
    Ticket done;                 /* the core reads no memory of other cores any more */
    XLA_FFI_CallFrame *call;
    uint64_t ticket;
    _Atomic(int) is_shared;      /* other programs want the cores, so waits sleep early */
    int hold, last_hold, quiet;  /* looks at the load: left as shared, in all the last time, without load since then */
} Core;

/* Groups of different sizes have different slots. So all cores of a group have seen the same sums in their slots, and
their counts agree even if two runs have the same number. */
static Core all_cores[MAX_SIZES][MAX_CORES];
static _Atomic(int) sizes[MAX_SIZES];
static _Atomic(uint32_t) sleepers, arrivals; /* of all groups; arrivals are counted while somebody sleeps */
static Ticket failure; /* of the run that failed last: a ticket without a number, or 0 */

/* Return the slots of groups of `num` cores; NULL if there are too many sizes. */
static Core *slots(int num) {
    for (int i = 0; i < MAX_SIZES; ++i) {
        int taken = 0;
        if (atomic_compare_exchange_strong(&sizes[i], &taken, num) || taken == num) return all_cores[i];
    }
    return NULL;
}

/* Sleep until a core arrives that was not counted in `seen`, but not long. Return whether the time ran out. */
static int sleep_until_arrival(uint32_t seen) {
    struct timespec limit = {.tv_nsec = SLEEP_NS};
#ifdef __linux__
    if (!syscall(SYS_futex, &arrivals, FUTEX_WAIT_PRIVATE, seen, &limit, NULL, 0)) return 0;
    if (errno == EAGAIN || errno == EINTR) return 0;
    if (errno == ETIMEDOUT) return 1;
#else
    (void)seen;
#endif
    nanosleep(&limit, NULL); /* there is no futex, or it is forbidden */
    return 1;
}

/* Tell the others, also those that sleep, that this core has reached `ticket`. */
static void arrive(Ticket *mine, uint64_t ticket) {
    atomic_store(mine, ticket);
    if (!atomic_load(&sleepers)) return;
    atomic_fetch_add(&arrivals, 1);
#ifdef __linux__
    syscall(SYS_futex, &arrivals, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* The upper half of a ticket of a run. */
static uint64_t of_run(int64_t run) { return (uint64_t)run << 32; }

void release_cores(int64_t run) { arrive(&failure, of_run(run)); }

static int has_reached(Ticket *other, uint64_t ticket) {
    uint64_t then = atomic_load(other);
    return then >> 32 == ticket >> 32 && then >= ticket;
}

/* Return the percent of this thread's time since the last call in which it was ready, but another thread had the core.

Linux counts both in nanoseconds; 0 elsewhere. */
static int measure_load(void) {
    static _Thread_local unsigned long long last_run, last_ready;
    unsigned long long run, ready, ran, waited;
    FILE *file = fopen("/proc/thread-self/schedstat", "r");
    int found = file ? fscanf(file, "%llu %llu", &run, &ready) : 0;
    if (file) fclose(file);
    if (found != 2) return 0;
    ran = run - last_run, waited = ready - last_ready;
    last_run = run, last_ready = ready;
    return ran + waited ? (int)(100 * waited / (ran + waited)) : 0;
}

/* Decide from a core's load for how many looks it counts as shared. Early sleep lowers the load itself, so a core stays
shared for a while, and longer each time that the load is back soon after. */
static void judge(Core *me, int load) {
    if (me->hold > 0) {
        me->hold = load > SHARED ? me->last_hold : me->hold - 1;
        me->quiet = 0;
    } else if (load > SHARED) {
        int longer = me->quiet < me->last_hold ? 2 * me->last_hold : me->last_hold / 2;
        me->hold = me->last_hold = longer < 4 ? 4 : longer > MAX_HOLD ? MAX_HOLD : longer;
    } else {
        ++me->quiet;
    }
}

/* Wait until another core reaches `ticket`. Return 0 if it never does, because its program has failed.

The timeout counts sleeps. A clock would also run while the process is stopped. */
static int wait_for(Ticket *other, uint64_t ticket, int most_spins, long most_s) {
    for (int spin = 0; spin < most_spins; ++spin) {
        if (has_reached(other, ticket)) return 1;
        cpu_relax();
    }
    int found = 0;
    atomic_fetch_add(&sleepers, 1);
    for (long waited = 0; waited < most_s * (1000000000L / SLEEP_NS) && !found;) {
        uint32_t seen = atomic_load(&arrivals);
        found = has_reached(other, ticket);
        if (!found && atomic_load(&failure) == (ticket & ~(uint64_t)UINT32_MAX)) break;
        if (!found) waited += sleep_until_arrival(seen);
    }
    atomic_fetch_sub(&sleepers, 1);
    return found;
}

static int wait_for_all(Core *cores, int num, size_t what, uint64_t ticket) {
    int is_shared = 0;
    for (int i = 0; i < num; ++i) is_shared |= atomic_load_explicit(&cores[i].is_shared, memory_order_relaxed);
    for (int i = 0; i < num; ++i)
        if (!wait_for((Ticket *)((char *)&cores[i] + what), ticket, is_shared ? FEW_SPINS : SPINS, TIMEOUT_S)) return 0;
    return 1;
}

static size_t min(size_t a, size_t b) { return a < b ? a : b; }

/* A core's array i, which is argument i + 1, and its sum: result i, or, if there is one result, a part of that. */
static int64_t num_arrays(const Core *core) { return core->call->args.size - 1; }
static size_t size_of(const Core *core, int64_t i) { return (size_t)count(argument(core->call, i + 1), 0); }
static const float *in(const Core *core, int64_t i) { return argument(core->call, i + 1)->data; }
static float *out(const Core *core, int64_t i, size_t before) {
    return core->call->rets.size == 1 ? (float *)result(core->call, 0)->data + before : result(core->call, i)->data;
}

static int same_arrays(const Core *one, const Core *other) {
    if (num_arrays(one) != num_arrays(other)) return 0;
    for (int64_t i = 0; i < num_arrays(one); ++i)
        if (size_of(one, i) != size_of(other, i)) return 0;
    return 1;
}

/* Sum elements [first, end) of array i, in the order of the cores. */
static void add(const Core *cores, int num, int64_t i, float *restrict sum, size_t first, size_t end) {
    const float *restrict a = in(&cores[0], i), *restrict b = in(&cores[num > 1], i);
    for (size_t j = first; j < end; ++j) sum[j] = num > 1 ? a[j] + b[j] : a[j];
    for (int core = 2; core < num; ++core) {
        const float *restrict next = in(&cores[core], i);
        for (size_t j = first; j < end; ++j) sum[j] += next[j];
    }
}

/* Return the first element of a core's slice. The slice ends at the first element of the next one. */
static size_t slice(int core, int num, size_t size) {
    size_t lines = (size + num * LINE - 1) / (num * LINE);
    return min(core * lines * LINE, size);
}

/* Announce this core's call. Return its group of `num` cores, its index among them and the ticket, or an error. */
static XLA_FFI_Error *enter(XLA_FFI_CallFrame *call, int num, Core **group, int *index, uint64_t *ticket) {
    XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
    XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
    XLA_FFI_Error *error = call->api->XLA_FFI_RunId_Get(&run);
    if (!error) error = call->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (error) return error;

    Core *all = slots(num);
    if (!all || device.device_ordinal < 0 || device.device_ordinal >= MAX_CORES)
        return failed(call->api, XLA_FFI_Error_Code_OUT_OF_RANGE, "too many devices for the all-reduce over cores");
    *index = device.device_ordinal % num;
    *group = &all[device.device_ordinal - *index];
    Core *me = &(*group)[*index];

    *ticket = me->ticket >> 32 == of_run(run.run_id) >> 32 ? me->ticket + 1 : of_run(run.run_id) | 1;
    me->ticket = *ticket;
    me->call = call;
    if (*ticket % SAMPLE == 0) {
        judge(me, measure_load());
        atomic_store_explicit(&me->is_shared, me->hold > 0, memory_order_relaxed);
    }
    arrive(&me->ready, *ticket);
    return NULL;
}

/* Arguments: the number of cores, int32 [], and arrays f32 [...]. Results: their sums, or all sums in one f32 [...]. */
XLA_FFI_Error *sum_over_cores(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    Core *cores;
    int num = *(int32_t *)argument(call, 0)->data, my_index;
    uint64_t ticket;
    XLA_FFI_Error *error = enter(call, num, &cores, &my_index, &ticket);
    if (error) return error;
    Core *me = &cores[my_index];

    if (!wait_for_all(cores, num, offsetof(Core, ready), ticket)) goto timeout;
    for (int core = 0; core < num; ++core)
        if (!same_arrays(me, &cores[core])) goto mismatch;
    const int64_t num_sums = num_arrays(me);
    size_t before = 0;
    for (int64_t i = 0, size; i < num_sums; ++i, before += size) {
        size = size_of(me, i);
        if (num <= MAX_WHOLE_SUMS) add(cores, num, i, out(me, i, before), 0, size);
        else add(cores, num, i, out(me, i, before), slice(my_index, num, size), slice(my_index + 1, num, size));
    }
    if (num > MAX_WHOLE_SUMS) {
        arrive(&me->summed, ticket);
        if (!wait_for_all(cores, num, offsetof(Core, summed), ticket)) goto timeout;
        before = 0;
        for (int64_t i = 0, size; i < num_sums; ++i, before += size) {
            size = size_of(me, i);
            for (int core = 0; core < num; ++core) {
                size_t first = slice(core, num, size), end = slice(core + 1, num, size);
                float *to = out(me, i, before) + first, *from = out(&cores[core], i, before) + first;
                if (core != my_index && first < end) memcpy(to, from, (end - first) * sizeof(float));
            }
        }
    }
    arrive(&me->done, ticket);

    if (!wait_for_all(cores, num, offsetof(Core, done), ticket)) goto timeout;
    return NULL;
mismatch: /* on all cores; each reads the others' arguments before it returns */
    arrive(&me->done, ticket);
    if (!wait_for_all(cores, num, offsetof(Core, done), ticket)) goto timeout;
    return failed(call->api, XLA_FFI_Error_Code_INTERNAL, "all-reduce: devices sum different arrays, or not in order");
timeout:
    return failed(call->api, XLA_FFI_Error_Code_ABORTED, "all-reduce: timeout; another device's program has failed");
}

/* Arguments: int32 [1 + n], which are the number of cores and the bytes of each array; and n arrays.
Results: the arrays of the first core, on every core.

The others sleep until it arrives, without a limit: it may play a rollout. Their cores are free for other processes. */
XLA_FFI_Error *copy_from_first_core(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const int32_t *numbers = argument(call, 0)->data;
    Core *cores;
    int num = numbers[0], my_index;
    uint64_t ticket;
    XLA_FFI_Error *error = enter(call, num, &cores, &my_index, &ticket);
    if (error) return error;
    Core *me = &cores[my_index];

    if (!wait_for(&cores[0].ready, ticket, FEW_SPINS, LONG_MAX / 1000000000L)) goto stopped;
    for (int64_t i = 0; i < call->rets.size; ++i)
        memcpy(result(call, i)->data, argument(cores[0].call, i + 1)->data, (size_t)numbers[i + 1]);
    arrive(&me->done, ticket);
    if (my_index == 0 && !wait_for_all(cores, num, offsetof(Core, done), ticket)) goto stopped;
    return NULL;
stopped:
    return failed(call->api, XLA_FFI_Error_Code_ABORTED, "another core's program has failed");
}
