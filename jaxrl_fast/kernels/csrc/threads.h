/* Run the parts of a task on XLA's threads. */

#ifndef JAXRL_FAST_THREADS_H
#define JAXRL_FAST_THREADS_H

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "ffi.h"

enum { MAX_SPINS = 1000 }; /* before the thread yields its core */

typedef void PartFunction(const void *args, int64_t part);
typedef struct {
    PartFunction *work;
    const void *args;
    int64_t parts;
    _Atomic(int64_t) next, done, users;
} Job;

static void run_parts(Job *job) {
    for (int64_t part; (part = atomic_fetch_add(&job->next, 1)) < job->parts; atomic_fetch_add(&job->done, 1))
        job->work(job->args, part);
}

static void release(Job *job) {
    if (atomic_fetch_sub(&job->users, 1) == 1) free(job);
}

/* Run by XLA's threads. A late one finds no part left; the last user frees the job. */
static void worker(void *job) {
    run_parts(job);
    release(job);
}

static void destroy_error(XLA_FFI_CallFrame *call, XLA_FFI_Error *error) {
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
    destroy_error(call, error);
    return 1;
}

/* Call work(args, part) for each part: on this thread and, if `multithreaded`, on idle threads of XLA. Parts run in any
order on any thread, so they must be independent. */
static void parallel_for(
    XLA_FFI_CallFrame *call, PartFunction *work, const void *args, int64_t parts, int multithreaded
) {
    int64_t threads = multithreaded && parts > 1 ? num_threads(call) : 1;
    int64_t workers = (threads < parts ? threads : parts) - 1;
    Job *job = workers > 0 ? malloc(sizeof(Job)) : NULL;
    if (!job) {
        for (int64_t part = 0; part < parts; ++part) work(args, part);
        return;
    }
    *job = (Job){.work = work, .args = args, .parts = parts, .users = workers + 1};
    for (int64_t i = 0; i < workers; ++i) {
        XLA_FFI_ThreadPool_Schedule_Args schedule = {
            XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, call->ctx, worker, job
        };
        XLA_FFI_Error *error = call->api->XLA_FFI_ThreadPool_Schedule(&schedule);
        if (!error) continue;
        release(job); /* in place of the worker that could not be scheduled */
        destroy_error(call, error);
    }
    run_parts(job);
    for (int64_t spins = 0; atomic_load(&job->done) < parts; ++spins)
        if (spins < MAX_SPINS) cpu_relax();
        else sched_yield();
    release(job);
}

#endif
