/* Call a function on the host that works on arrays at fixed addresses, such as a step of environments in Python. */

#include <string.h>

#include "ffi.h"

typedef struct {
    uint64_t address, num_bytes;
} Block;

/* Arguments: a handle; the address of `int function(void)` and a Block for each array, as bytes; and arrays.
Results: the handle; and arrays.

The arrays among the arguments are copied to their blocks, and the function is called. If it returns 0, the blocks of the
results are copied to these. A handle is passed on, so that the calls of one pool keep their order. */
XLA_FFI_Error *call_host(XLA_FFI_CallFrame *call) {
    if (is_metadata_query(call)) return NULL;
    const char *table = argument(call, 1)->data;
    const int64_t num_inputs = call->args.size - 2, num_outputs = call->rets.size - 1;
    uint64_t function;
    memcpy(&function, table, sizeof(function));
    table += sizeof(function);
    for (int64_t i = 0; i < num_inputs; ++i, table += sizeof(Block)) {
        Block block;
        memcpy(&block, table, sizeof(block));
        memcpy((void *)(uintptr_t)block.address, argument(call, i + 2)->data, block.num_bytes);
    }
    if (((int (*)(void))(uintptr_t)function)()) {
        XLA_FFI_RunId_Get_Args run = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, call->ctx, 0};
        if (!call->api->XLA_FFI_RunId_Get(&run)) release_cores(run.run_id);
        return failed(call->api, XLA_FFI_Error_Code_INTERNAL, "a function on the host has failed");
    }
    memcpy(result(call, 0)->data, argument(call, 0)->data, count(argument(call, 0), 0));
    for (int64_t i = 0; i < num_outputs; ++i, table += sizeof(Block)) {
        Block block;
        memcpy(&block, table, sizeof(block));
        memcpy(result(call, i + 1)->data, (const void *)(uintptr_t)block.address, block.num_bytes);
    }
    return NULL;
}
