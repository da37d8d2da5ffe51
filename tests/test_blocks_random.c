/* SPDX-License-Identifier: Apache-2.0 */
/* The block manager beside a slow plain model of it (xllm #828): thousands of random calls, right and wrong ones, some
 * with host memory running out. After each call the tables, the order of the free list, the pending copies and all
 * lengths are the model's, and a simulated device holds at each committed position the token that was written there. */
#include "blocks_support.h"

#include <stdio.h>

#define SEQUENCES  12
#define BLOCKS     40
#define MAX_TOKENS (BLOCKS * 7)
#define STEPS      3
#define ACTIONS    2000

typedef struct model_sequence {
    bool live;
    kvleaf_seq handle;
    int64_t committed, extended;
    int32_t step; /* the open step it is in, or -1 */
    int32_t num_q;
    int32_t table[BLOCKS], count;
    int32_t tokens[MAX_TOKENS]; /* what was written at each committed position */
} model_sequence;

typedef struct model {
    kvleaf_blocks *real;
    int32_t block_size, max_blocks;
    model_sequence sequences[SEQUENCES];
    int32_t free[BLOCKS], num_free;
    kvleaf_block_copy copies[SEQUENCES + 1];
    int32_t num_copies;
    int32_t held_slots[BLOCKS]; /* by pending copies that read the block */
    int32_t memory[BLOCKS][7];  /* the device */
    int32_t next_token;
    uint64_t random;
    int32_t failures;   /* allocations to fail: one in this many, 0 = none */
    int32_t counts[16]; /* answers by -status */
} model;

static uint32_t next_random(model *m)
{
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return (uint32_t)(m->random >> 32);
}

static int32_t pick(model *m, int32_t n)
{
    return n > 0 ? (int32_t)(next_random(m) % (uint32_t)n) : 0;
}

static void *fickle_allocate(void *user, size_t size)
{
    model *m = user;
    return m->failures && pick(m, m->failures) == 0 ? NULL : malloc(size);
}

static void fickle_release(void *user, void *memory)
{
    (void)user;
    free(memory);
}

static int32_t blocks_for(const model *m, int64_t tokens)
{
    return (int32_t)((tokens + m->block_size - 1) / m->block_size);
}

static int32_t holders(const model *m, int32_t block)
{
    int32_t count = 0;
    for (int32_t i = 0; i < SEQUENCES; i++)
        for (int32_t j = 0; m->sequences[i].live && j < m->sequences[i].count; j++)
            count += m->sequences[i].table[j] == block;
    return count;
}

static int32_t readers(const model *m, int32_t block)
{
    int32_t count = 0;
    for (int32_t i = 0; i < m->num_copies; i++)
        count += m->copies[i].src == block;
    return count;
}

static int32_t filler(const model *m, int32_t block)
{
    for (int32_t i = 0; i < m->num_copies; i++)
        if (m->copies[i].dst == block)
            return i;
    return -1;
}

static void free_if_unheld(model *m, int32_t block)
{
    if (readers(m, block) == 0)
        m->held_slots[block] = 0;
    if (readers(m, block) == 0 && holders(m, block) == 0)
        m->free[m->num_free++] = block;
}

static void end_copy(model *m, int32_t at)
{
    int32_t source = m->copies[at].src;
    memmove(&m->copies[at], &m->copies[at + 1], (size_t)(m->num_copies - at - 1) * sizeof *m->copies);
    m->num_copies--;
    free_if_unheld(m, source);
}

/* After a table lost `block`. */
static void lose(model *m, int32_t block)
{
    free_if_unheld(m, block);
    if (holders(m, block) == 0 && filler(m, block) >= 0)
        end_copy(m, filler(m, block));
}

static int32_t take(model *m)
{
    int32_t block = m->free[0];
    memmove(m->free, m->free + 1, (size_t)--m->num_free * sizeof *m->free);
    return block;
}

static void cut(model *m, model_sequence *s, int64_t length)
{
    while (s->count > blocks_for(m, length))
        lose(m, s->table[--s->count]);
    s->extended = length;
    if (s->committed > length)
        s->committed = length;
}

/* Whether an extension by `count` tokens must copy the last block, and its answer. */
static kvleaf_status predict_extend(const model *m, const model_sequence *s, int64_t count, bool *copies)
{
    int32_t slot = (int32_t)(s->extended % m->block_size), last = s->count ? s->table[s->count - 1] : -1;
    *copies = count > 0 && slot > 0 && (holders(m, last) > 1 || slot < m->held_slots[last]);
    if (s->extended + count > (int64_t)m->max_blocks * m->block_size)
        return KVLEAF_TOO_SMALL;
    return blocks_for(m, s->extended + count) - s->count + *copies > m->num_free ? KVLEAF_NO_BLOCKS : KVLEAF_OK;
}

static void apply_extend(model *m, model_sequence *s, int64_t count, bool copies)
{
    if (copies) {
        int32_t last = s->table[s->count - 1], from = filler(m, last) >= 0 ? m->copies[filler(m, last)].src : last;
        int32_t slots = (int32_t)(s->committed - (int64_t)(s->count - 1) * m->block_size);
        s->table[s->count - 1] = take(m);
        m->copies[m->num_copies++] = (kvleaf_block_copy){from, s->table[s->count - 1]};
        if (m->held_slots[from] < slots)
            m->held_slots[from] = slots;
        if (from == last || holders(m, last) == 0)
            free_if_unheld(m, last);
    }
    while (s->count < blocks_for(m, s->extended + count))
        s->table[s->count++] = take(m);
    s->extended += count;
}

/* The device makes the first `count` listed copies all at once: no block may be read and written. */
static void run_copies(model *m, int32_t count)
{
    const kvleaf_block_copy *copies;
    int32_t all = pending(m->real, &copies), before[BLOCKS][7];
    assert_int_equal(all, m->num_copies);
    if (count > all)
        count = all;
    memcpy(before, m->memory, sizeof before);
    for (int32_t i = 0; i < count; i++)
        memcpy(m->memory[copies[i].dst], before[copies[i].src], sizeof before[0]);
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < all; j++)
            assert_true(copies[i].src != copies[j].dst);
    for (int32_t i = 0; i < count; i++) {
        kvleaf_block_copy made = copies[i];
        assert_true(filler(m, made.dst) >= 0);
        assert_int_equal(m->copies[filler(m, made.dst)].src, made.src);
        end_copy(m, filler(m, made.dst));
    }
    assert_ok(kvleaf_blocks_copies_done(m->real, 0, count));
}

static void compare_sequence(const model *m, const model_sequence *s)
{
    int32_t table[BLOCKS], count;
    kvleaf_seq_info info = info_of(m->real, s->handle);
    assert_int_equal(info.committed, s->committed);
    assert_int_equal(info.planned, s->committed + (s->step >= 0 ? s->num_q : 0));
    assert_int_equal(info.extended, s->extended);
    assert_ok(kvleaf_blocks_seq_table(m->real, s->handle, 0, table, BLOCKS, &count));
    assert_int_equal(count, s->count);
    for (int32_t i = 0; i < count; i++)
        assert_int_equal(table[i], s->table[i]);
    for (int64_t p = 0; p < s->committed; p++) {
        int32_t block = table[p / m->block_size];
        if (filler(m, block) >= 0)
            block = m->copies[filler(m, block)].src;
        assert_int_equal(m->memory[block][p % m->block_size], s->tokens[p]);
    }
}

static void compare(const model *m)
{
    check_blocks(m->real, 0);
    int32_t at = m->real->groups[0].free.first;
    assert_int_equal(m->real->groups[0].free.count, m->num_free);
    for (int32_t i = 0; i < m->num_free; i++, at = m->real->groups[0].free.blocks[at].next)
        assert_int_equal(at, m->free[i]);
    assert_int_equal(m->real->groups[0].num_copies, m->num_copies);
    for (int32_t i = 0; i < m->num_copies; i++)
        assert_true(filler(m, m->real->groups[0].copies[i].dst) >= 0);
    for (int32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(m->real->groups[0].blocks[i].pinned_slots, m->held_slots[i]);
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (m->sequences[i].live)
            compare_sequence(m, &m->sequences[i]);
}

static model_sequence *unused_sequence(model *m)
{
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (!m->sequences[i].live)
            return &m->sequences[i];
    return NULL;
}

/* Host memory may have run out, where the real manager allocates; then nothing must have changed. */
static bool happened(model *m, kvleaf_status got, kvleaf_status expected)
{
    m->counts[-got]++;
    if (got == KVLEAF_NO_MEMORY && m->failures && expected == KVLEAF_OK)
        return false;
    if (got != expected)
        fail_msg("%s, not %s: %s", kvleaf_status_name(got), kvleaf_status_name(expected), kvleaf_last_error()->message);
    return got == KVLEAF_OK;
}

static void do_create(model *m)
{
    model_sequence *s = unused_sequence(m);
    kvleaf_seq handle = 0;
    if (!happened(m, kvleaf_blocks_seq_create(m->real, NULL, &handle), s ? KVLEAF_OK : KVLEAF_TOO_SMALL))
        return;
    *s = (model_sequence){.live = true, .handle = handle, .step = -1};
}

static void do_extend(model *m, model_sequence *s)
{
    int64_t count = pick(m, 8) == 0 ? pick(m, MAX_TOKENS) : pick(m, m->block_size + 2);
    bool copies, can;
    kvleaf_status expected = predict_extend(m, s, count, &copies);
    assert_ok(kvleaf_blocks_can_extend(m->real, s->handle, count, &can));
    assert_int_equal(can, expected == KVLEAF_OK);
    if (happened(m, extend(m->real, s->handle, count), s->step >= 0 ? KVLEAF_BUSY : expected))
        apply_extend(m, s, count, copies);
}

static void do_fork(model *m, model_sequence *s)
{
    model_sequence *child = unused_sequence(m);
    int64_t pos = s->committed - pick(m, 3);
    pos = pos < 0 || pick(m, 3) == 0 ? pick(m, (int32_t)s->committed + 2) : pos; /* one too far now and then */
    kvleaf_seq handle = 0;
    kvleaf_status expected = pos > s->committed ? KVLEAF_INVALID : child ? KVLEAF_OK : KVLEAF_TOO_SMALL;
    if (!happened(m, kvleaf_blocks_seq_fork(m->real, s->handle, pos, &handle), expected))
        return;
    *child = *s;
    child->handle = handle;
    child->step = -1;
    child->committed = child->extended = pos;
    child->count = blocks_for(m, pos);
    if (pick(m, 2))
        do_extend(m, child);
}

static void do_truncate(model *m, model_sequence *s)
{
    int64_t length = s->extended - pick(m, pick(m, 3) ? m->block_size + 2 : (int32_t)s->extended + 1);
    kvleaf_status expected = s->step >= 0 ? KVLEAF_BUSY : length < 0 ? KVLEAF_INVALID : KVLEAF_OK;
    if (happened(m, kvleaf_blocks_seq_truncate(m->real, s->handle, length), expected))
        cut(m, s, length);
}

static void do_destroy(model *m, model_sequence *s)
{
    kvleaf_seq former = s->handle;
    kvleaf_status expected = s->step >= 0 ? KVLEAF_BUSY : KVLEAF_OK;
    if (!happened(m, kvleaf_blocks_seq_destroy(m->real, &s->handle), expected))
        return;
    cut(m, s, 0);
    s->live = false;
    assert_int_equal(kvleaf_blocks_seq_destroy(m->real, &former), KVLEAF_STALE);
}

/* Opens a step over some sequences; one that is in another makes it BUSY, and one without tokens INVALID. */
static void do_begin(model *m)
{
    kvleaf_seq seqs[SEQUENCES];
    int32_t num_q[SEQUENCES], n = 0, chosen[SEQUENCES], step = -1;
    bool used[STEPS] = {false}, busy = false, fussy = pick(m, 6) == 0;
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (m->sequences[i].live && m->sequences[i].step >= 0)
            used[m->sequences[i].step] = true;
    for (int32_t i = 0; i < STEPS; i++)
        step = used[i] ? step : i;
    if (step < 0)
        return;
    for (int32_t i = 0; i < SEQUENCES; i++) {
        model_sequence *s = &m->sequences[i];
        int32_t most = (int32_t)(s->extended - s->committed);
        if (!s->live || pick(m, 2) || most == 0 || (s->step >= 0 && !fussy))
            continue;
        busy = busy || s->step >= 0;
        chosen[n] = i;
        seqs[n] = s->handle;
        num_q[n++] = 1 + pick(m, most);
    }
    if (!happened(m, kvleaf_blocks_step_begin(m->real, seqs, num_q, n), busy ? KVLEAF_BUSY : KVLEAF_OK))
        return;
    for (int32_t i = 0; i < n; i++) {
        m->sequences[chosen[i]].step = step;
        m->sequences[chosen[i]].num_q = num_q[i];
    }
    run_copies(m, m->num_copies);
}

/* Writes an open step's tokens, as the device does in call order, and closes it one way or the other. */
static void do_close(model *m)
{
    kvleaf_seq seqs[SEQUENCES];
    int32_t accepted[SEQUENCES], n = 0, chosen[SEQUENCES], step = pick(m, STEPS);
    bool commit = pick(m, 4) != 0, all = pick(m, 2) != 0;
    for (int32_t i = 0; i < SEQUENCES; i++) {
        model_sequence *s = &m->sequences[i];
        if (!s->live || s->step != step)
            continue;
        for (int64_t p = s->committed; p < s->committed + s->num_q; p++) {
            int32_t token = m->next_token++;
            m->memory[s->table[p / m->block_size]][p % m->block_size] = token;
            s->tokens[p] = token;
        }
        chosen[n] = i;
        seqs[n] = s->handle;
        accepted[n++] = all ? s->num_q : pick(m, s->num_q + 1);
    }
    if (commit)
        assert_ok(kvleaf_blocks_step_commit(m->real, seqs, all ? NULL : accepted, n));
    else
        assert_ok(kvleaf_blocks_step_rollback(m->real, seqs, n));
    for (int32_t i = 0; i < n; i++) {
        model_sequence *s = &m->sequences[chosen[i]];
        s->step = -1;
        if (!commit)
            continue;
        s->committed += accepted[i];
        if (accepted[i] < s->num_q)
            cut(m, s, s->committed);
    }
}

static void act(model *m)
{
    model_sequence *s = &m->sequences[pick(m, SEQUENCES)];
    int32_t action = pick(m, 26);
    if (action < 3)
        do_create(m);
    else if (!s->live)
        return;
    else if (action < 10)
        do_extend(m, s);
    else if (action < 15)
        do_fork(m, s);
    else if (action < 17)
        do_truncate(m, s);
    else if (action < 18)
        do_destroy(m, s);
    else if (action < 20)
        do_begin(m);
    else if (action < 25)
        do_close(m);
    else
        run_copies(m, pick(m, 3));
}

/* What several runs met, so that none of them was tame. */
typedef struct tally {
    int64_t copies, ok, no_blocks, no_memory, busy;
} tally;

static void run(int32_t block_size, int32_t max_blocks, int32_t failures, uint64_t seed, tally *met)
{
    model *m = calloc(1, sizeof *m);
    m->block_size = block_size;
    m->max_blocks = max_blocks;
    m->random = seed * 0x9e3779b97f4a7c15u + 1;
    for (int32_t i = 0; i < BLOCKS; i++)
        m->free[i] = (i * 7 + 3) % BLOCKS;
    m->num_free = BLOCKS;
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = BLOCKS, .block_size = block_size,
                                                        .max_sequences = SEQUENCES, .max_blocks_per_seq = max_blocks,
                                                        .free_order = m->free, .free_count = BLOCKS,
                                                        .allocator = {fickle_allocate, fickle_release, m}),
                                   &m->real));
    m->failures = failures;
    for (int32_t i = 0; i < ACTIONS; i++) {
        act(m);
        compare(m);
    }
    for (int32_t step = 0; step < 100 * STEPS; step++)
        do_close(m);
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (m->sequences[i].live)
            do_destroy(m, &m->sequences[i]);
    compare(m);
    kvleaf_blocks_stats stats = stats_of(m->real);
    assert_int_equal(stats.used + stats.pinned + stats.sequences + stats.tokens + stats.slots_wasted, 0);
    assert_int_equal(stats.free, BLOCKS);
    met->copies += (int64_t)stats.copies;
    met->ok += m->counts[-KVLEAF_OK];
    met->no_blocks += m->counts[-KVLEAF_NO_BLOCKS];
    met->no_memory += m->counts[-KVLEAF_NO_MEMORY];
    met->busy += m->counts[-KVLEAF_BUSY];
    kvleaf_blocks_destroy(&m->real);
    free(m);
}

static uint64_t base_seed = 20240917;

static void assert_met(const tally *met, int32_t runs, bool memory)
{
    printf("%lld calls, %lld copies, %lld without blocks, %lld without memory, %lld busy\n", (long long)met->ok,
           (long long)met->copies, (long long)met->no_blocks, (long long)met->no_memory, (long long)met->busy);
    assert_true(met->ok > 500 * (int64_t)runs);
    assert_true(met->copies > 10 * (int64_t)runs);
    assert_true(met->no_blocks > runs);
    assert_true(met->busy > 10 * (int64_t)runs);
    assert_true(memory ? met->no_memory == 0 : met->no_memory > runs);
}

static void test_random(void **state)
{
    (void)state;
    static const int32_t sizes[] = {1, 2, 3, 4, 7};
    tally met = {0};
    for (int32_t i = 0; i < 5; i++)
        for (uint64_t seed = 0; seed < 20; seed++)
            run(sizes[i], BLOCKS, 0, base_seed + seed, &met);
    assert_met(&met, 100, true);
}

static void test_random_with_narrow_tables(void **state)
{
    (void)state;
    tally met = {0};
    for (uint64_t seed = 0; seed < 20; seed++)
        run(4, 11, 0, base_seed + seed, &met);
    assert_met(&met, 20, true);
}

static void test_random_without_memory(void **state)
{
    (void)state;
    tally met = {0};
    for (uint64_t seed = 0; seed < 20; seed++)
        run(3, BLOCKS, 2, base_seed + seed, &met);
    assert_met(&met, 20, false);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        base_seed = strtoull(argv[1], NULL, 10);
    printf("seed %llu\n", (unsigned long long)base_seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_random_with_narrow_tables),
        cmocka_unit_test(test_random_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
