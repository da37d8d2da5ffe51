/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_ATTENTION_RIG_H
#define KVL_ATTENTION_RIG_H

/* Devices for tests that run problems through the caller-level API by several variants. */

#include "problem.h"
#include "support.h"

enum { ATTENTION_RIG_SEQS = 24, ATTENTION_RIG_TOKENS = 512, ATTENTION_RIG_CONTEXT = 2048 }; /* of a batch, at most */

typedef struct attention_rig {
    const char *name;
    const char *variants; /* NULL = those that the device takes */
    problem_view view;    /* of K and V, where a test goes over views */
    kvleaf_device *device;
    cl_command_queue queue;
} attention_rig;

/* Opens each one's device and queue; `opencl` NULL = the loader's table. */
void attention_rig_open(attention_rig *rigs, int32_t count, const kvleaf_opencl *opencl);
void attention_rig_close(attention_rig *rigs, int32_t count);

/* For tests that need no others, as cmocka's group fixtures: the portable variants and those that the device takes,
 * over the table that counts and fails. The state is attention_rig[ATTENTION_RIGS]. */
enum { ATTENTION_RIGS = 2 };
int attention_rigs_set_up(void **state);
int attention_rigs_tear_down(void **state);

kvleaf_attention *attention_rig_make(const attention_rig *rig, const problem_geometry *geometry, int32_t device_tables);
void attention_rig_problem(const attention_rig *rig, const problem_geometry *geometry, const problem_seq *seqs,
                           int32_t num_seqs, const problem_options *options, problem *out);
/* Makes a problem, attends and compares with the reference; the problem stays for more questions. */
void attention_rig_solve(const attention_rig *rig, kvleaf_attention *attention, const problem_geometry *geometry,
                         const problem_seq *seqs, int32_t num_seqs, const problem_options *options, problem *out);

#endif
