/* SPDX-License-Identifier: Apache-2.0 */
/* Swap: what comes back has the bits that went, shared blocks go once, the copies are ordered against whatever queue
 * writes the blocks, and what cannot be swapped changes nothing. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "shim.h"
#include "stats.h"

enum { WINDOW = 10 };

/* Two groups, one with a window; few blocks, so that what is put aside makes room. */
static rig_params params(void)
{
    rig_params p = rig_defaults();
    p.window[1] = WINDOW;
    p.num_blocks = 24;
    p.swap_blocks = 16;
    return p;
}

static void swap_out(rig *r, const rig_seq *seq)
{
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    ASSERT_OK(kvleaf_seq_swap_out(r->cache, seq->seq, &exec));
}

static void swap_in(rig *r, const rig_seq *seq)
{
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    ASSERT_OK(kvleaf_seq_swap_in(r->cache, seq->seq, &exec));
}

/* Overwrites everything that is free: what a sequence left behind is not there to be found. */
static void use_all_blocks(rig *r)
{
    rig_seq *other = rig_seq_new(r);
    kvleaf_blocks_stats group = {.struct_size = sizeof group};
    ASSERT_OK(kvleaf_blocks_query_group(kvleaf_cache_blocks(r->cache), 0, &group));
    int32_t count = (group.free + group.cached) * r->p.block_size;
    for (int32_t done = 0; done < count; done += 32) {
        int32_t part = count - done < 32 ? count - done : 32;
        rig_extend(r, other, part);
        rig_run_one(r, other, part, KVLEAF_FAMILY_PREFILL, "others");
    }
    rig_seq_end(r, other);
}

/* Decodes a few tokens and keeps the bits of all layers. */
static uint8_t *decode(rig *r, rig_seq *seq, const int32_t *tokens, int32_t count, size_t *size)
{
    size_t row = rig_row_bytes(r, 0);
    *size = row * (size_t)(count * r->p.num_layers);
    uint8_t *bits = malloc(*size), *at = bits;
    for (int32_t i = 0; i < count; i++) {
        rig_extend_with(r, seq, &tokens[i], 1);
        rig_run_one(r, seq, 1, KVLEAF_FAMILY_DECODE, "decode");
        for (int32_t layer = 0; layer < r->p.num_layers; layer++, at += row)
            memcpy(at, rig_out(r, layer, 0), row);
    }
    return bits;
}

/* A sequence that was out goes on as one that was not: the same bits. */
static void test_same_bits(void **state)
{
    (void)state;
    rig r;
    rig_params p = params();
    rig_open(&r, &p);
    const int32_t next[] = {701, 702, 703, 704, 705, 706};
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 29);
    rig_run_one(&r, seq, 29, KVLEAF_FAMILY_PREFILL, "prompt");
    rig_seq *twin = rig_seq_fork(&r, seq, 29);
    size_t size;
    uint8_t *stayed = decode(&r, twin, next, 6, &size);
    rig_seq_end(&r, twin);
    kvleaf_blocks_stats before = rig_stats(&r);
    swap_out(&r, seq);
    kvleaf_blocks_stats out = rig_stats(&r);
    assert_int_equal(out.swapped, 1);
    assert_true(out.used < before.used && out.host_used > 0);
    use_all_blocks(&r);
    swap_in(&r, seq);
    assert_int_equal(rig_stats(&r).host_used, 0);
    rig_check_stored(&r, seq, "returned");
    uint8_t *returned = decode(&r, seq, next, 6, &size);
    assert_memory_equal(stayed, returned, size);
    free(stayed);
    free(returned);
    rig_close(&r);
}

/* Two that share a prefix, one of them with a copy pending: the prefix goes once and comes back shared. */
static void test_shared_blocks_go_once(void **state)
{
    (void)state;
    rig r;
    rig_params p = params();
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 22);
    rig_run_one(&r, a, 22, KVLEAF_FAMILY_AUTO, "prompt");
    rig_seq *b = rig_seq_fork(&r, a, 22);
    rig_extend(&r, b, 3); /* its block is to be copied first */
    kvleaf_blocks_stats before = rig_stats(&r);
    swap_out(&r, b);
    swap_out(&r, a);
    kvleaf_blocks_stats out = rig_stats(&r);
    assert_int_equal(out.swapped, 2);
    assert_int_equal(out.used, 0);
    assert_int_equal(out.pinned, 0);
    assert_int_equal(out.host_used, before.used);
    assert_int_equal(out.swapped_out, before.used - r.num_groups); /* nothing is computed in the child's last blocks */
    use_all_blocks(&r);
    swap_in(&r, a);
    swap_in(&r, b);
    kvleaf_blocks_stats in = rig_stats(&r);
    assert_int_equal(in.used, before.used);
    assert_int_equal(in.swapped, 0);
    assert_int_equal(in.host_used, 0);
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, b, "child");
    rig_extend(&r, a, 2);
    rig_run(&r, &(rig_step){.seqs = {b, a}, .num_q = {3, 2}, .n = 2}, "both go on");
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, b, "child");
    rig_close(&r);
}

/* What a sequence that stayed writes into a block that both had does not come back with the other. */
static void test_written_while_it_was_out(void **state)
{
    (void)state;
    rig r;
    rig_params p = params();
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 23);
    rig_run_one(&r, a, 23, KVLEAF_FAMILY_AUTO, "prompt");
    rig_seq *b = rig_seq_fork(&r, a, 21);
    swap_out(&r, a);
    rig_extend(&r, b, 2); /* alone in the block now, over what the other had there */
    rig_run_one(&r, b, 2, KVLEAF_FAMILY_AUTO, "stayed");
    swap_in(&r, a);
    rig_check_stored(&r, a, "returned");
    rig_check_stored(&r, b, "stayed");
    swap_out(&r, a);
    swap_out(&r, b);
    swap_in(&r, b);
    swap_in(&r, a);
    rig_extend(&r, a, 1);
    rig_extend(&r, b, 1);
    rig_run(&r, &(rig_step){.seqs = {a, b}, .num_q = {1, 1}, .n = 2}, "both again");
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, b, "child");
    rig_close(&r);
}

/* vllm #45704: a slow producer writes the blocks on one queue, they are swapped out on another, and a third writes what
 * is made in the blocks that this left. */
static void test_slow_producer(void **state)
{
    (void)state;
    static const cl_command_queue_properties kinds[] = {0, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE};
    for (size_t kind = 0; kind < 2; kind++) {
        rig r;
        rig_params p = params();
        p.num_layers = 1;
        p.queue_properties = kinds[kind];
        rig_open(&r, &p);
        cl_command_queue second = support_queue(r.device), third = support_queue(r.device);
        rig_seq *seq = rig_seq_new(&r);
        rig_extend(&r, seq, 20);
        const rig_step prompt = {.seqs = {seq}, .num_q = {20}, .n = 1};
        ASSERT_OK(rig_build(&r, &prompt));
        rig_load(&r, &prompt, 0);
        cl_int error;
        cl_event gate = clCreateUserEvent(kvleaf_device_context(r.device), &error);
        assert_int_equal(error, CL_SUCCESS);
        kvleaf_exec slow = rig_exec(&r, &prompt), other = {.struct_size = sizeof other, .queue = second};
        slow.num_wait = 1;
        slow.wait_list = &gate;
        ASSERT_OK(rig_append_on(&r, &prompt, 0, &slow)); /* writes the blocks once the gate is open */
        rig_commit(&r, &prompt, NULL);
        ASSERT_OK(kvleaf_seq_swap_out(r.cache, seq->seq, &other));
        rig_seq *next = rig_seq_new(&r);
        rig_extend(&r, next, 80); /* of 24 blocks, 20: those that were just left among them */
        const rig_step reuse = {.seqs = {next}, .num_q = {80}, .n = 1, .queue = third};
        ASSERT_OK(rig_build(&r, &reuse));
        clFlush(second);
        clFlush(third);
        rig_pause();
        assert_int_equal(clSetUserEventStatus(gate, CL_COMPLETE), CL_SUCCESS);
        clReleaseEvent(gate);
        rig_layers(&r, &reuse, "in the blocks that were left");
        rig_commit(&r, &reuse, NULL);
        rig_check_stored(&r, next, "next");
        rig_seq_end(&r, next);
        ASSERT_OK(kvleaf_seq_swap_in(r.cache, seq->seq, &other));
        assert_int_equal(clFinish(second), CL_SUCCESS); /* what comes next reads on the rig's own queue */
        rig_check_stored(&r, seq, "returned");
        clReleaseCommandQueue(second);
        clReleaseCommandQueue(third);
        rig_close(&r);
    }
}

/* Many go out and come back in turn, with more to hold than the pool has. */
static void test_preemption(void **state)
{
    (void)state;
    enum { SEQS = 4, TURNS = 6 };
    rig r;
    rig_params p = params();
    p.swap_blocks = 64;
    p.num_blocks = 20;
    rig_open(&r, &p);
    rig_seq *seqs[SEQS];
    for (int32_t i = 0; i < SEQS; i++) {
        seqs[i] = rig_seq_new(&r);
        rig_extend(&r, seqs[i], 25 + i);
        rig_run_one(&r, seqs[i], 25 + i, KVLEAF_FAMILY_AUTO, "prompt");
        swap_out(&r, seqs[i]);
    }
    for (int32_t turn = 0; turn < TURNS; turn++) {
        rig_seq *pair[] = {seqs[turn % SEQS], seqs[(turn + 1) % SEQS]};
        for (int32_t i = 0; i < 2; i++) {
            swap_in(&r, pair[i]);
            rig_extend(&r, pair[i], 3);
        }
        rig_run(&r, &(rig_step){.seqs = {pair[0], pair[1]}, .num_q = {3, 3}, .n = 2}, "turn");
        for (int32_t i = 0; i < 2; i++) {
            rig_check_stored(&r, pair[i], "turn");
            swap_out(&r, pair[i]);
        }
    }
    for (int32_t i = 0; i < SEQS; i++)
        rig_seq_end(&r, seqs[i]); /* also while they are out */
    kvleaf_blocks_stats stats = rig_stats(&r);
    assert_int_equal(stats.used, 0);
    assert_int_equal(stats.host_used, 0);
    rig_close(&r);
}

/* A return that evicts cached blocks and fails when some layers are written: what the prefix cache still finds is
 * whole, and the same call succeeds. */
static void test_failed_return_over_cached_blocks(void **state)
{
    (void)state;
    rig r;
    rig_params p = params();
    p.num_blocks = 14;
    p.num_layers = 3; /* the first and the last are of one group */
    p.opencl = shim_table();
    shim_reset();
    rig_open(&r, &p);
    int32_t prompt[33];
    for (int32_t i = 0; i < 33; i++)
        prompt[i] = 900 + i;
    rig_seq *seq = rig_seq_new(&r);
    rig_extend(&r, seq, 30);
    rig_run_one(&r, seq, 30, KVLEAF_FAMILY_AUTO, "prompt");
    swap_out(&r, seq);
    rig_seq *cached = rig_seq_new(&r);
    rig_extend_with(&r, cached, prompt, 33);
    rig_run_one(&r, cached, 33, KVLEAF_FAMILY_PREFILL, "to be cached");
    rig_seq_end(&r, cached);
    const kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    shim.fail_only = SHIM_EnqueueWriteBuffer;
    shim.calls = 0;
    shim.fail_at = 2; /* one layer is on its way */
    kvleaf_blocks_stats before = rig_stats(&r);
    ASSERT_STATUS(KVLEAF_DEVICE, kvleaf_seq_swap_in(r.cache, seq->seq, &exec));
    shim.fail_at = 0;
    shim.fail_only = -1;
    kvleaf_blocks_stats after = rig_stats(&r);
    assert_true(after.cached < before.cached); /* some were evicted, or this would show nothing */
    assert_int_equal(after.used, before.used);
    rig_seq *hit = rig_seq_new(&r);
    rig_extend_with(&r, hit, prompt, 33);
    rig_check_stored(&r, hit, "found after the failure");
    rig_run_one(&r, hit, 33 - hit->committed, KVLEAF_FAMILY_PREFILL, "behind a hit");
    rig_seq_end(&r, hit);
    ASSERT_OK(kvleaf_seq_swap_in(r.cache, seq->seq, &exec));
    rig_check_stored(&r, seq, "returned");
    rig_close(&r);
}

static void test_refusals(void **state)
{
    (void)state;
    rig r, none;
    rig_params p = params();
    p.swap_blocks = 5;
    p.no_plan = true;
    rig_open(&none, &(rig_params){.q_dtype = p.q_dtype,
                                  .kv_dtype = p.kv_dtype,
                                  .out_dtype = p.out_dtype,
                                  .num_layers = 1,
                                  .num_heads = 1,
                                  .num_kv_heads = 1,
                                  .head_dim = 4,
                                  .block_size = 4,
                                  .num_blocks = 4,
                                  .max_tokens = 8,
                                  .no_plan = true});
    p.no_plan = false;
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r), *large = rig_seq_new(&r), *plain = rig_seq_new(&none), *gone = rig_seq_new(&r);
    kvleaf_seq stale = gone->seq;
    rig_seq_end(&r, gone);
    rig_extend(&r, seq, 9);
    rig_run_one(&r, seq, 9, KVLEAF_FAMILY_AUTO, "prompt");
    rig_extend(&r, seq, 2);
    rig_extend(&r, large, 40);
    rig_run_one(&r, large, 40, KVLEAF_FAMILY_AUTO, "prompt");
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0}), plain_exec = rig_exec(&none, &(rig_step){0});
    kvleaf_blocks_stats before = rig_stats(&r);
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "swap_blocks", kvleaf_seq_swap_out(none.cache, plain->seq, &plain_exec));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_swap_out(NULL, seq->seq, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_swap_in(NULL, seq->seq, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "exec", kvleaf_seq_swap_out(r.cache, seq->seq, NULL));
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvleaf_seq_swap_out(r.cache, seq->seq, &plain_exec));
    ASSERT_STATUS(KVLEAF_STALE, kvleaf_seq_swap_out(r.cache, stale, &exec));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_seq_swap_in(r.cache, seq->seq, &exec)); /* it is not out */
    ASSERT_STATUS(KVLEAF_NO_BLOCKS, kvleaf_seq_swap_out(r.cache, large->seq, &exec));
    const rig_step step = {.seqs = {seq}, .num_q = {1}, .n = 1};
    ASSERT_OK(rig_build(&r, &step));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_swap_out(r.cache, seq->seq, &exec));
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    kvleaf_blocks_stats after = rig_stats(&r);
    assert_true(same_stats(&before, &after));
    /* While it is out. */
    ASSERT_OK(kvleaf_seq_swap_out(r.cache, seq->seq, &exec));
    before = rig_stats(&r);
    uint8_t bytes[4096];
    int32_t count;
    kvleaf_seq child;
    const kvleaf_tokens one = {.struct_size = sizeof one, .count = 1};
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_seq_swap_out(r.cache, seq->seq, &exec));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_extend(r.cache, seq->seq, &one, NULL));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_fork(r.cache, seq->seq, 3, &child));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_truncate(r.cache, seq->seq, 3));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_table(r.cache, seq->seq, 0, NULL, 0, &count));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_seq_export(r.cache, seq->seq, 0, 1, bytes, sizeof bytes, &exec));
    ASSERT_STATUS(KVLEAF_BUSY,
                  kvleaf_seq_import(r.cache, seq->seq, 9, 1, bytes, kvleaf_cache_token_bytes(r.cache, 1), &exec));
    ASSERT_STATUS(KVLEAF_BUSY, rig_build(&r, &step));
    rig_seq *hog = rig_seq_new(&r);
    before = rig_stats(&r);
    kvleaf_blocks_stats group = {.struct_size = sizeof group};
    ASSERT_OK(kvleaf_blocks_query_group(kvleaf_cache_blocks(r.cache), 0, &group));
    rig_extend(&r, hog, (group.free + group.cached) * p.block_size);
    before = rig_stats(&r);
    ASSERT_STATUS(KVLEAF_NO_BLOCKS, kvleaf_seq_swap_in(r.cache, seq->seq, &exec));
    after = rig_stats(&r);
    assert_true(same_stats(&before, &after));
    rig_seq_end(&r, hog);
    ASSERT_OK(kvleaf_seq_swap_in(r.cache, seq->seq, &exec));
    rig_run(&r, &step, "after refusals");
    rig_check_stored(&r, seq, "after refusals");
    rig_close(&r);
    rig_close(&none);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_shared_blocks_go_once),
        cmocka_unit_test(test_written_while_it_was_out),
        cmocka_unit_test(test_slow_producer),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_failed_return_over_cached_blocks),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
