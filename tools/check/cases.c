/* SPDX-License-Identifier: Apache-2.0 */
/* The cases of one operation on one shape: ragged batches around every length at which a kernel does something else,
 * compared with the reference, then the same rows again in other company and bit for bit the same. */
#include "check/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct check_batch {
    problem_seq seqs[CHECK_MAX_SEQS];
    int32_t num_seqs, tokens;
    int64_t budget; /* multiply-adds left for the reference to do */
    uint64_t seed;
    const check_rig *rig;
} check_batch;

static uint64_t draw(check_batch *batch)
{
    return batch->seed = problem_hash(batch->seed, 1);
}

/* Adds a sequence; lengths that would take the reference too long are cut. */
static void add(check_batch *batch, int32_t q_len, int32_t kv_len, kvleaf_family family, kvleaf_mask mask)
{
    const problem_geometry *g = &batch->rig->shape->geometry;
    int64_t cost = (int64_t)g->num_heads * g->head_dim;
    int32_t longest = batch->rig->small ? 40 : CHECK_MAX_CONTEXT;
    if (batch->num_seqs == CHECK_MAX_SEQS || batch->tokens >= CHECK_MAX_TOKENS)
        return;
    if (batch->rig->small && q_len > 9)
        q_len = 9;
    if (q_len > CHECK_MAX_TOKENS - batch->tokens)
        q_len = CHECK_MAX_TOKENS - batch->tokens;
    int64_t keys = batch->budget / (cost * (q_len > 0 ? q_len : 1)) / 2;
    if (keys > longest)
        keys = longest;
    if (kv_len > keys)
        kv_len = (int32_t)keys;
    batch->budget -= cost * q_len * kv_len;
    batch->tokens += q_len;
    batch->seqs[batch->num_seqs] = (problem_seq){
        .id = (uint32_t)batch->num_seqs + 1, .q_len = q_len, .kv_len = kv_len, .family = family, .mask = mask};
    batch->num_seqs++;
}

static void begin(check_batch *batch, const check_rig *rig, kvl_operation operation, uint64_t part)
{
    memset(batch, 0, sizeof(*batch));
    batch->rig = rig;
    batch->budget = rig->small ? 200000 : 20000000;
    batch->seed = problem_hash(rig->shape->seed, (uint64_t)operation << 8 | part);
}

/* Keys that a variant takes at once: lengths on both sides of it are where it can go wrong. */
static int32_t stride_of(const kvl_variant *variant)
{
    return variant->split_tokens ? variant->split_tokens : 256;
}

int32_t check_long_row(const kvl_variant *decode, const problem_geometry *geometry)
{
    const kvl_geometry as_chosen = check_geometry(geometry);
    int32_t run = decode ? kvl_longest_run_keys(decode, &as_chosen) : 0;
    bool little = geometry->num_heads * geometry->head_dim <= 640;
    return run <= KVL_PART_KEYS ? 0 : little ? 2 * run : 3 * KVL_PART_KEYS;
}

/* Adds such a row; its cost is not counted. */
static void add_long(check_batch *batch)
{
    int32_t longest = check_long_row(batch->rig->variant, &batch->rig->shape->geometry);
    if (!longest || batch->rig->small || batch->num_seqs == CHECK_MAX_SEQS)
        return;
    int32_t kv_len = longest - (int32_t)(draw(batch) % (uint64_t)(longest / 3));
    batch->seqs[batch->num_seqs] = (problem_seq){
        .id = (uint32_t)batch->num_seqs + 1, .q_len = 1, .kv_len = kv_len, .family = KVLEAF_FAMILY_DECODE};
    batch->num_seqs++;
}

static void decode_batch(check_batch *batch)
{
    const problem_geometry *g = &batch->rig->shape->geometry;
    const int32_t bs = g->block_size, split = stride_of(batch->rig->variant);
    const kvleaf_family family = KVLEAF_FAMILY_DECODE;
    const int32_t edges[] = {2 * split + 37, split, split + 1, split - 1, bs, bs + 1, bs - 1, 1};
    uint64_t rotate = draw(batch);
    add(batch, 1, 0, family, KVLEAF_MASK_CAUSAL);
    for (int i = 0; i < 8; i++)
        add(batch, 1, edges[(i + rotate) % 8], family, i % 3 ? KVLEAF_MASK_CAUSAL : KVLEAF_MASK_NONE);
    add(batch, 0, 5, family, KVLEAF_MASK_CAUSAL);
    add(batch, 3, (int32_t)(draw(batch) % (uint64_t)(split + 60)) + 3, family, KVLEAF_MASK_CAUSAL);
    add(batch, 4, 2, family, KVLEAF_MASK_CAUSAL);
    add(batch, 2, (int32_t)(draw(batch) % 90) + 1, family, KVLEAF_MASK_NONE);
    add(batch, 0, 0, family, KVLEAF_MASK_NONE);
    add(batch, 1, (int32_t)(draw(batch) % (uint64_t)(3 * split)) + 1, family, KVLEAF_MASK_CAUSAL);
    add_long(batch);
}

static void prefill_batch(check_batch *batch)
{
    const problem_geometry *g = &batch->rig->shape->geometry;
    const int32_t bs = g->block_size, group = g->num_heads / g->num_kv_heads;
    const kvleaf_family family = KVLEAF_FAMILY_PREFILL;
    int32_t rows = batch->rig->variant->tile_rows / group; /* queries of a tile */
    int32_t tile = rows > 1 ? rows : 1;
    add(batch, tile + 1, tile + 1, family, KVLEAF_MASK_CAUSAL);
    add(batch, 1, 1, family, KVLEAF_MASK_CAUSAL);
    add(batch, 8, 5, family, KVLEAF_MASK_CAUSAL);
    add(batch, 0, bs, family, KVLEAF_MASK_CAUSAL);
    add(batch, 3, 0, family, KVLEAF_MASK_NONE);
    add(batch, (int32_t)(draw(batch) % 9) + 2, 256 + 33 + (int32_t)(draw(batch) % 40), family, KVLEAF_MASK_CAUSAL);
    add(batch, bs < 20 ? bs + 1 : 5, bs, family, KVLEAF_MASK_CAUSAL);
    add(batch, 2, bs + 1, family, KVLEAF_MASK_NONE);
    add(batch, 5, bs - 1, family, KVLEAF_MASK_NONE);
    add(batch, 37, 37, family, KVLEAF_MASK_CAUSAL);
    add(batch, 1, 256, family, KVLEAF_MASK_NONE);
    add(batch, 2, 257, family, KVLEAF_MASK_CAUSAL);
    add(batch, 1, 255, family, KVLEAF_MASK_CAUSAL);
    add(batch, (int32_t)(draw(batch) % 30) + 1, (int32_t)(draw(batch) % 120) + 1, family, KVLEAF_MASK_CAUSAL);
}

/* Prefill and decode, and sequences that leave the choice to the library, in one batch. */
static void mixed_batch(check_batch *batch)
{
    static const kvleaf_family families[] = {KVLEAF_FAMILY_DECODE, KVLEAF_FAMILY_PREFILL, KVLEAF_FAMILY_AUTO};
    for (int i = 0; i < 9; i++) {
        int32_t q_len = i % 3 == 1 ? (int32_t)(draw(batch) % 12) : 1 + (i == 5) * 3;
        int32_t kv_len = q_len + (int32_t)(draw(batch) % 100);
        add(batch, q_len, kv_len, families[i % 3], KVLEAF_MASK_CAUSAL);
    }
}

static void describe_batch(const check_batch *batch, char *text, size_t size)
{
    static const char *const families[] = {"auto", "prefill", "decode"};
    size_t used = 0;
    for (int32_t i = 0; i < batch->num_seqs && used + 1 < size; i++) {
        const problem_seq *seq = &batch->seqs[i];
        int written = snprintf(text + used, size - used, "%s%d:%d%s %s", i ? ", " : "", seq->q_len, seq->kv_len,
                               seq->mask == KVLEAF_MASK_CAUSAL ? "c" : "n", families[seq->family]);
        used += written > 0 ? (size_t)written : 0;
    }
}

static void fail_api(problem_report *report, const char *what)
{
    const kvleaf_error *error = kvleaf_last_error();
    problem_fail(report, "%s: %s: %s", what, kvleaf_status_name(error->status), error->message);
}

/* Makes a problem of these sequences and attends; `placement` moves its blocks. */
static bool attend(const check_rig *rig, const check_batch *batch, const problem_seq *seqs, int32_t num_seqs,
                   uint64_t placement, problem *out, problem_report *report)
{
    problem_options options = {.seed = batch->rig->shape->seed,
                               .placement = placement,
                               .poison = placement % 2 ? PROBLEM_INFINITY : PROBLEM_NAN};
    if (!problem_create(out, rig->device, rig->queue, &rig->shape->geometry, seqs, num_seqs, &options)) {
        problem_fail(report, "%s", out->fault);
        return false;
    }
    if (problem_attend(out, rig->attention) != KVLEAF_OK)
        fail_api(report, "attend");
    else if (out->fault[0])
        problem_fail(report, "%s", out->fault);
    else
        return true;
    problem_destroy(out);
    return false;
}

static void compare_rows(const problem *whole, int32_t index, int32_t row, const problem *other, int32_t other_row,
                         int32_t rows, const char *how, problem_report *report)
{
    if (report->passed && !problem_same_rows(whole, whole->cu_q[index] + row, other, other_row, rows))
        problem_fail(report, "sequence %d (q %d, kv %d), rows %d to %d: other bits %s", index, whole->seqs[index].q_len,
                     whole->seqs[index].kv_len, row, row + rows - 1, how);
}

/* attend as for a device of so many compute units. */
static bool attend_by(cl_uint units, const check_rig *rig, const check_batch *batch, const problem_seq *seqs,
                      int32_t num_seqs, uint64_t placement, problem *out, problem_report *report)
{
    kvl_engine_set_units(rig->attention->engine, units);
    bool done = attend(rig, batch, seqs, num_seqs, placement, out, report);
    kvl_engine_set_units(rig->attention->engine, 0);
    return done;
}

/* The batch backwards, in other blocks, by one compute unit. */
static void check_reversed(const check_rig *rig, const check_batch *batch, const problem *whole, problem_report *report)
{
    problem_seq seqs[CHECK_MAX_SEQS];
    problem other;
    int32_t n = batch->num_seqs;
    for (int32_t i = 0; i < n; i++)
        seqs[i] = batch->seqs[n - 1 - i];
    if (!attend_by(1, rig, batch, seqs, n, batch->seed + 1, &other, report))
        return;
    for (int32_t i = 0; i < n; i++)
        compare_rows(whole, i, 0, &other, other.cu_q[n - 1 - i], seqs[n - 1 - i].q_len,
                     "in another order of the batch, other blocks and by one compute unit", report);
    problem_destroy(&other);
}

static void check_alone(const check_rig *rig, const check_batch *batch, const problem *whole, int32_t index,
                        cl_uint units, problem_report *report)
{
    problem other;
    if (batch->seqs[index].q_len == 0 ||
        !attend_by(units, rig, batch, &batch->seqs[index], 1, batch->seed + 7, &other, report))
        return;
    compare_rows(whole, index, 0, &other, 0, batch->seqs[index].q_len, "alone", report);
    problem_destroy(&other);
}

/* A causal prompt in pieces: each row sees what it saw, and must come out the same. */
static void check_chunked(const check_rig *rig, const check_batch *batch, const problem *whole, int32_t index,
                          problem_report *report)
{
    problem_seq piece = batch->seqs[index];
    int32_t q_len = piece.q_len, first = piece.kv_len - q_len;
    uint64_t seed = batch->seed;
    for (int32_t row = 0, length; row < q_len && report->passed; row += length) {
        problem other;
        seed = problem_hash(seed, 3);
        length = row == 0 ? 1 : 1 + (int32_t)(seed % 16);
        length = length > q_len - row ? q_len - row : length;
        piece.q_len = length;
        piece.kv_len = first + row + length;
        if (!attend(rig, batch, &piece, 1, seed, &other, report))
            return;
        compare_rows(whole, index, row, &other, 0, length, "as a chunk of the prompt", report);
        problem_destroy(&other);
    }
}

static void widen(problem_report *into, const problem_report *one)
{
    into->worst = one->worst > into->worst ? one->worst : into->worst;
    into->worst_lse = one->worst_lse > into->worst_lse ? one->worst_lse : into->worst_lse;
    into->tolerance = one->tolerance;
}

/* The causal sequence with the most rows whose keys reach back to all of them. */
static int32_t longest_prompt(const check_batch *batch)
{
    int32_t best = -1;
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        const problem_seq *seq = &batch->seqs[i];
        if (seq->mask == KVLEAF_MASK_CAUSAL && seq->q_len > 1 && seq->kv_len >= seq->q_len &&
            seq->family != KVLEAF_FAMILY_AUTO && (best < 0 || seq->q_len > batch->seqs[best].q_len))
            best = i;
    }
    return best;
}

static void check_attend(const check_rig *rig, check_batch *batch, check_result *result)
{
    problem whole;
    problem_report report = {.passed = true};
    if (!result->report.passed)
        return;
    if (attend(rig, batch, batch->seqs, batch->num_seqs, batch->seed, &whole, &report)) {
        problem_verify(&whole, &report);
        int32_t prompt = longest_prompt(batch);
        if (report.passed)
            check_reversed(rig, batch, &whole, &report);
        if (report.passed)
            check_alone(rig, batch, &whole, (int32_t)(batch->seed % (uint64_t)batch->num_seqs), 0, &report);
        if (report.passed) /* which may be long: some units a KV head, so that runs have parts and the row has runs */
            check_alone(rig, batch, &whole, batch->num_seqs - 1, 4 * (cl_uint)rig->shape->geometry.num_kv_heads,
                        &report);
        if (report.passed && prompt >= 0)
            check_chunked(rig, batch, &whole, prompt, &report);
        problem_destroy(&whole);
    }
    widen(&result->report, &report);
    if (!report.passed) {
        problem_fail(&result->report, "%s", report.text);
        describe_batch(batch, result->batch, sizeof(result->batch));
    }
}

/* Append (every dtype of new keys that a call may have) or gather, over one ragged batch. */
static void check_move(const check_rig *rig, kvl_operation operation, check_result *result)
{
    problem_geometry whole = rig->shape->geometry;
    const problem_geometry *g = &whole;
    const int32_t bs = g->block_size;
    const kvleaf_dtype sources[] = {g->q_dtype, g->kv_dtype, KVLEAF_F32};
    check_batch batch;
    problem made;
    whole.window = 0; /* so that no key is poison */
    begin(&batch, rig, operation, 0);
    const int32_t lengths[][2] = {{1, 1},          {0, 0},      {2, bs + 1}, {bs, bs},
                                  {3, 3 * bs + 2}, {0, bs - 1}, {1, bs},     {7, 19}};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
        add(&batch, rig->small && lengths[i][0] > 4 ? 4 : lengths[i][0], lengths[i][1], KVLEAF_FAMILY_AUTO,
            KVLEAF_MASK_CAUSAL);
    for (int32_t i = 0; i < batch.num_seqs; i++) /* only what lies in the sequence can be appended in place */
        if (batch.seqs[i].q_len > batch.seqs[i].kv_len)
            batch.seqs[i].q_len = batch.seqs[i].kv_len;
    problem_options options = {.seed = rig->shape->seed, .placement = batch.seed};
    if (!problem_create(&made, rig->device, rig->queue, g, batch.seqs, batch.num_seqs, &options)) {
        problem_fail(&result->report, "%s", made.fault);
        return;
    }
    int runs = operation == KVL_GATHER ? 1 : 4;
    for (int i = 0; i < runs && result->report.passed; i++) {
        problem_report report;
        kvleaf_status status = operation == KVL_GATHER
                                   ? problem_gather(&made, rig->attention, &report)
                                   : problem_append(&made, rig->attention, sources[i % 3], i % 2 == 0, &report);
        if (status != KVLEAF_OK)
            fail_api(&report, kvl_operation_name(operation));
        if (!report.passed) {
            problem_fail(&result->report, "%s", report.text);
            describe_batch(&batch, result->batch, sizeof(result->batch));
        }
    }
    problem_destroy(&made);
}

/* One token a sequence, appended by the call that attends: at lengths where a split or a block begins or ends. */
static void check_fused(const check_rig *rig, check_result *result)
{
    const problem_geometry *g = &rig->shape->geometry;
    const int32_t bs = g->block_size, split = stride_of(rig->variant);
    const kvleaf_dtype sources[] = {g->q_dtype, g->kv_dtype, KVLEAF_F32};
    const int32_t lengths[] = {1, split, bs, 0, split + 1, bs + 1, 2 * split, 3 * bs - 1, split - 1, 2 * split + 5};
    for (int i = 0; i < 3 && result->report.passed && g->view != PROBLEM_CONTIGUOUS; i++) {
        check_batch batch;
        problem made;
        problem_report report = {.passed = true};
        begin(&batch, rig, KVL_DECODE, 2 + (uint64_t)i);
        for (size_t j = 0; j < sizeof(lengths) / sizeof(lengths[0]); j++)
            add(&batch, 1, lengths[(j + (size_t)i) % 10], KVLEAF_FAMILY_DECODE, KVLEAF_MASK_CAUSAL);
        add_long(&batch);
        problem_options options = {
            .seed = rig->shape->seed, .placement = batch.seed, .poison = (problem_poison)(i % 2)};
        if (!problem_create(&made, rig->device, rig->queue, g, batch.seqs, batch.num_seqs, &options)) {
            problem_fail(&result->report, "%s", made.fault);
            return;
        }
        kvl_engine_set_units(rig->attention->engine, i == 2 ? 1 : 0);
        if (problem_append_attend(&made, rig->attention, sources[i], i % 2 == 1, &report) != KVLEAF_OK)
            fail_api(&report, "append and attend");
        kvl_engine_set_units(rig->attention->engine, 0);
        problem_destroy(&made);
        widen(&result->report, &report);
        if (!report.passed) {
            problem_fail(&result->report, "append and attend at once: %s", report.text);
            describe_batch(&batch, result->batch, sizeof(result->batch));
        }
    }
}

static void check_merge(const check_rig *rig, check_result *result)
{
    static const int32_t parts[] = {1, 2, 3, 7, 64, 161};
    int count = rig->small ? 4 : 6;
    for (int i = 0; i < count && result->report.passed; i++) {
        problem_report report;
        kvleaf_status status = problem_merge(rig->device, rig->queue, rig->attention, &rig->shape->geometry, parts[i],
                                             rig->small ? 7 : 14, rig->shape->seed, &report);
        if (status != KVLEAF_OK)
            fail_api(&report, "merge");
        widen(&result->report, &report);
        if (!report.passed) {
            problem_fail(&result->report, "%s", report.text);
            snprintf(result->batch, sizeof(result->batch), "%d parts of %d rows", parts[i], rig->small ? 7 : 14);
        }
    }
}

void check_run(const check_rig *rig, kvl_operation operation, check_result *result)
{
    check_batch batch;
    memset(result, 0, sizeof(*result));
    result->report.passed = true;
    if (operation == KVL_MERGE) {
        check_merge(rig, result);
    } else if (operation == KVL_DECODE || operation == KVL_PREFILL) {
        begin(&batch, rig, operation, 0);
        if (operation == KVL_DECODE)
            decode_batch(&batch);
        else
            prefill_batch(&batch);
        check_attend(rig, &batch, result);
        if (operation == KVL_DECODE)
            check_fused(rig, result);
        if (operation == KVL_PREFILL) {
            begin(&batch, rig, operation, 1);
            mixed_batch(&batch);
            check_attend(rig, &batch, result);
        }
    } else {
        check_move(rig, operation, result);
    }
}
