/* SPDX-License-Identifier: Apache-2.0 */
#include "attention_rig.h"

#include "shim.h"

void attention_rig_open(attention_rig *rigs, int32_t count, const kvleaf_opencl *opencl)
{
    for (attention_rig *rig = rigs; rig < rigs + count; rig++) {
        kvleaf_device_params params = support_params();
        params.variants = rig->variants;
        params.opencl = opencl;
        ASSERT_OK(support_create(&params, &rig->device));
        rig->queue = support_queue(rig->device);
    }
}

void attention_rig_close(attention_rig *rigs, int32_t count)
{
    for (attention_rig *rig = rigs; rig < rigs + count; rig++) {
        clReleaseCommandQueue(rig->queue);
        kvleaf_device_destroy(&rig->device);
    }
}

int attention_rigs_set_up(void **state)
{
    static attention_rig rigs[ATTENTION_RIGS] = {{.name = "portable", .variants = "*.portable.*"}, {.name = "default"}};
    shim_reset();
    attention_rig_open(rigs, ATTENTION_RIGS, shim_table());
    *state = rigs;
    return 0;
}

int attention_rigs_tear_down(void **state)
{
    attention_rig_close(*state, ATTENTION_RIGS);
    return 0;
}

kvleaf_attention *attention_rig_make(const attention_rig *rig, const problem_geometry *geometry, int32_t device_tables)
{
    kvleaf_attention_params params =
        problem_attention_params(geometry, ATTENTION_RIG_SEQS, ATTENTION_RIG_TOKENS, ATTENTION_RIG_CONTEXT);
    kvleaf_attention *attention = NULL;
    params.device_tables = device_tables;
    ASSERT_OK(kvleaf_attention_create(rig->device, &params, &attention));
    return attention;
}

void attention_rig_problem(const attention_rig *rig, const problem_geometry *geometry, const problem_seq *seqs,
                           int32_t num_seqs, const problem_options *options, problem *out)
{
    if (!problem_create(out, rig->device, rig->queue, geometry, seqs, num_seqs, options))
        fail_msg("%s", out->fault);
}

void attention_rig_solve(const attention_rig *rig, kvleaf_attention *attention, const problem_geometry *geometry,
                         const problem_seq *seqs, int32_t num_seqs, const problem_options *options, problem *out)
{
    problem_report report;
    attention_rig_problem(rig, geometry, seqs, num_seqs, options, out);
    ASSERT_OK(problem_attend(out, attention));
    if (!problem_verify(out, &report))
        fail_msg("%s, window %d: %s", rig->name, geometry->window, report.text);
}
