/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_ATTENTION_H
#define KVL_ATTENTION_H

/* The object of the caller-level API: attention.c makes and runs it, batch.c plans its steps. */

#include "attention/engine.h"

struct kvleaf_attention {
    kvleaf_device *device;
    kvl_engine *engine;
    kvl_engine_params params;
    kvl_step_seq *seqs; /* [params.max_seqs] of the step being planned */
    float softmax_scale;
};

/* Checks object and exec, and starts the call's commands as one chain on the application's queue. */
kvleaf_status kvl_attention_begin(kvleaf_attention *attention, const kvleaf_exec *exec, kvl_chain *chain);

#endif
