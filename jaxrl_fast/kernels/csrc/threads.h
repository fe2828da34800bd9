/* Work in parts that XLA's threads share, where a program has a CPU to itself. */

#ifndef JAXRL_FAST_SHARE_H
#define JAXRL_FAST_SHARE_H

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "ffi.h"

enum { LOOKS_FOR_OTHERS = 1000 }; /* before others are offered the core */

typedef void Work(const void *what, int64_t part);
typedef struct {
    Work *work;
    const void *what;
    int64_t parts;
    _Atomic(int64_t) next, done, users;
} Shared;

static void take_parts(Shared *shared) {
    for (int64_t part; (part = atomic_fetch_add(&shared->next, 1)) < shared->parts; atomic_fetch_add(&shared->done, 1))
        shared->work(shared->what, part);
}

static void leave(Shared *shared) {
    if (atomic_fetch_sub(&shared->users, 1) == 1) free(shared);
}

/* A thread may come when all is done: what it looks at is there until the last has left. */
static void help(void *shared) {
    take_parts(shared);
    leave(shared);
}

static void forget(XLA_FFI_CallFrame *call, XLA_FFI_Error *error) {
    XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    call->api->XLA_FFI_Error_Destroy(&args);
}

static int64_t num_threads(XLA_FFI_CallFrame *call) {
    int64_t found = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args = {
        XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, call->ctx, &found
    };
    XLA_FFI_Error *error = call->api->XLA_FFI_ThreadPool_NumThreads(&args);
    if (!error) return found;
    forget(call, error);
    return 1;
}

/* work(what, part) for each part: by this thread, and those that XLA has to spare if `widely`. Who does which is left
to chance, so parts must not depend on each other. */
static void share(XLA_FFI_CallFrame *call, Work *work, const void *what, int64_t parts, int widely) {
    int64_t threads = widely && parts > 1 ? num_threads(call) : 1;
    int64_t helpers = (threads < parts ? threads : parts) - 1;
    Shared *shared = helpers > 0 ? malloc(sizeof(Shared)) : NULL;
    if (!shared) {
        for (int64_t part = 0; part < parts; ++part) work(what, part);
        return;
    }
    *shared = (Shared){.work = work, .what = what, .parts = parts, .users = helpers + 1};
    for (int64_t i = 0; i < helpers; ++i) {
        XLA_FFI_ThreadPool_Schedule_Args args = {
            XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, call->ctx, help, shared
        };
        XLA_FFI_Error *error = call->api->XLA_FFI_ThreadPool_Schedule(&args);
        if (!error) continue;
        leave(shared); /* in the place of the one that does not come */
        forget(call, error);
    }
    take_parts(shared);
    for (int64_t looks = 0; atomic_load(&shared->done) < parts; ++looks)
        if (looks < LOOKS_FOR_OTHERS) rest();
        else sched_yield();
    leave(shared);
}

#endif
