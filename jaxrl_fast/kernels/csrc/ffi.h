/* Helpers for functions that XLA calls by its foreign function interface (FFI). */

#ifndef JAXRL_FAST_FFI_H
#define JAXRL_FAST_FFI_H

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

/* Answer the call and return 1 if XLA only queries the function's metadata, else return 0. The extension's type has
another name from jaxlib 0.11 on, so the code does not name it. */
static inline int is_metadata_query(XLA_FFI_CallFrame *call) {
    if (!call->extension_start || call->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)call->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 1;
}

static inline XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *call, int i) { return call->args.args[i]; }
static inline XLA_FFI_Buffer *result(XLA_FFI_CallFrame *call, int i) { return call->rets.rets[i]; }

/* Return the product of an array's axes, without the last `but` ones. */
static inline int64_t count(const XLA_FFI_Buffer *x, int64_t but) {
    int64_t size = 1;
    for (int64_t i = 0; i < x->rank - but; ++i) size *= x->dims[i];
    return size;
}

/* Return an error, which ends the program. */
static inline XLA_FFI_Error *failed(const XLA_FFI_Api *api, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
    return api->XLA_FFI_Error_Create(&args);
}

/* Let the cores that wait for each other in a run give up, because it has failed on one of them (allreduce.c). */
void release_cores(int64_t run);

/* Tell the CPU that this thread spins. */
static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
