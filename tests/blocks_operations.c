/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on sequences and steps. */
#include "blocks_operations.h"

#include <string.h>

kvleaf_seq_params driver_seq_params(driver *d)
{
    kvleaf_seq_params params = {.struct_size = sizeof params, .user = (uint64_t)driver_choose(d, 100)};
    if (driver_one_in(d, 3))
        params.salt = (uint64_t)driver_choose(d, 3);
    if (driver_one_in(d, 4))
        params.priority = KVLEAF_PRIORITY_LOW + driver_choose(d, KVLEAF_PRIORITY_HIGH - KVLEAF_PRIORITY_LOW + 1);
    if (driver_one_in(d, 4))
        params.ttl_ms = 20 * (uint64_t)(1 + driver_choose(d, 10));
    params.no_prefix = driver_one_in(d, 12);
    return params;
}

void operate_create(driver *d)
{
    kvleaf_seq_params params = driver_seq_params(d);
    bool usual = driver_choose(d, 2) == 0;
    kvleaf_seq handle = 0;
    int32_t at = -1;
    pair_note(&d->pair, "create%s salt %d priority %d ttl %d no_prefix %d", usual ? " usual, not" : "",
              (int)params.salt, params.priority, (int)params.ttl_ms, params.no_prefix);
    kvleaf_status expected = model_create(&d->pair.m, usual ? NULL : &params, &at);
    if (!driver_answered(d, kvleaf_blocks_seq_create(d->pair.real, usual ? NULL : &params, &handle), expected))
        return;
    d->pair.handles[at] = handle;
    d->step[at] = NO_STEP;
    d->prompt[at] = driver_choose(d, PROMPTS);
}

/* Tokens of a prompt, now and then another one, which leads astray. */
void driver_ids(driver *d, int32_t prompt, int64_t from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        d->ids[i] =
            driver_one_in(d, d->stray) ? driver_choose(d, WORDS) : d->prompts[prompt][(from + i) % MODEL_TOKENS];
}

/* Up to two pictures among the tokens, not many different ones. */
int32_t driver_spans(driver *d, int64_t count, kvleaf_span spans[2])
{
    int32_t n = 0;
    int64_t start = 0;
    while (n < 2 && start < count && driver_one_in(d, 8)) {
        spans[n].start = start + driver_choose(d, (int32_t)(count - start));
        spans[n].count = 1 + driver_choose(d, (int32_t)(count - spans[n].start));
        spans[n].key[0] = (uint64_t)driver_choose(d, 2);
        spans[n].key[1] = 0;
        start = spans[n].start + spans[n].count;
        n++;
    }
    return n;
}

static void extend_by(driver *d, int32_t at, int64_t count)
{
    kvleaf_span spans[2];
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = driver_one_in(d, 8) ? NULL : d->ids, .count = count};
    int64_t cached = -1, expected_cached = -1;
    bool can = false;
    driver_ids(d, d->prompt[at], d->pair.m.sequences[at].extended, count);
    tokens.spans = spans;
    tokens.num_spans = driver_spans(d, count, spans);
    pair_note(&d->pair, "extend %d by %d%s, %d spans", at, (int)count, tokens.ids ? "" : " unknown", tokens.num_spans);
    bool out = d->pair.m.sequences[at].swapped;
    kvleaf_status status = kvleaf_blocks_can_extend(d->pair.real, d->pair.handles[at], count, &can);
    if (status != (out ? KVLEAF_BUSY : KVLEAF_OK) || (!out && can != model_can_extend(&d->pair.m, at, count)))
        pair_wrong(&d->pair, "can_extend says %d", can);
    kvleaf_status expected = model_extend(&d->pair.m, at, &tokens, d->ids, &expected_cached);
    status = kvleaf_blocks_seq_extend(d->pair.real, d->pair.handles[at], &tokens, &cached);
    if (!driver_answered(d, status, expected))
        return;
    if (cached != expected_cached)
        pair_wrong(&d->pair, "cached is %d, not %d", (int)cached, (int)expected_cached);
    d->tally.hits += cached > 0;
    d->tally.partial_hits += cached % d->pair.m.p.block_size > 0;
}

void operate_extend(driver *d)
{
    int32_t at = driver_sequence(d);
    if (at < 0)
        return;
    static const int32_t blocks[] = {0, 0, 1, 1, 2, 4, 8, MODEL_BLOCKS};
    int32_t most = blocks[driver_choose(d, 8)] * d->pair.m.p.block_size + 2;
    extend_by(d, at, driver_choose(d, most < MODEL_TOKENS ? most : MODEL_TOKENS));
}

void operate_fork(driver *d)
{
    int32_t at = driver_sequence(d), child = -1;
    if (at < 0)
        return;
    int64_t committed = d->pair.m.sequences[at].committed, pos = committed - driver_choose(d, 3);
    if (driver_one_in(d, 3))
        pos = driver_choose(d, (int32_t)committed + 3) - 1; /* one too far now and then */
    kvleaf_seq handle = 0;
    pair_note(&d->pair, "fork %d at %d", at, (int)pos);
    kvleaf_status expected = model_fork(&d->pair.m, at, pos, &child);
    if (!driver_answered(d, kvleaf_blocks_seq_fork(d->pair.real, d->pair.handles[at], pos, &handle), expected))
        return;
    d->pair.handles[child] = handle;
    d->step[child] = NO_STEP;
    d->prompt[child] = d->prompt[at];
    if (d->failing)
        d->before = d->pair.m;
    int32_t next = driver_choose(d, 5);
    if (next < 2)
        extend_by(d, child, 1 + driver_choose(d, d->pair.m.p.block_size));
    else if (next == 2)
        driver_swap(d, child, true, true); /* while its parent may write behind it in the same block */
}

void operate_truncate(driver *d)
{
    int32_t at = driver_sequence(d);
    if (at < 0)
        return;
    int64_t extended = d->pair.m.sequences[at].extended;
    bool far = driver_one_in(d, 4);
    int64_t length = extended + 1 - driver_choose(d, far ? (int32_t)extended + 3 : d->pair.m.p.block_size + 2);
    pair_note(&d->pair, "truncate %d to %d", at, (int)length);
    kvleaf_status expected = model_truncate(&d->pair.m, at, length);
    driver_answered(d, kvleaf_blocks_seq_truncate(d->pair.real, d->pair.handles[at], length), expected);
}

void operate_destroy(driver *d)
{
    int32_t at = driver_sequence(d);
    if (at < 0)
        return;
    kvleaf_seq handle = d->pair.handles[at];
    pair_note(&d->pair, "destroy %d", at);
    kvleaf_status expected = model_destroy(&d->pair.m, at);
    if (driver_answered(d, kvleaf_blocks_seq_destroy(d->pair.real, &d->pair.handles[at]), expected))
        d->destroyed = handle;
}

/* Makes the first pending copies of a group, all of them where `most` is negative. */
static void copy_blocks(driver *d, int32_t group, int32_t most)
{
    const kvleaf_block_copy *copies = NULL;
    kvleaf_block_copy made[MODEL_BLOCKS];
    int32_t count = -1;
    if (kvleaf_blocks_copies(d->pair.real, group, &copies, &count) || count != d->pair.m.groups[group].copies_src.count)
        pair_wrong(&d->pair, "%d copies are pending in group %d, not %d", count, group,
                   d->pair.m.groups[group].copies_src.count);
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < count; j++)
            if (copies[i].src == copies[j].dst)
                pair_wrong(&d->pair, "block %d is copied and written by pending copies", copies[i].src);
    count = most >= 0 && most < count ? most : count;
    memcpy(made, copies, (size_t)count * sizeof *made);
    if (!model_make_copies(&d->pair.m, group, made, count))
        pair_wrong(&d->pair, "a copy is listed that is not pending");
    driver_answered(d, kvleaf_blocks_copies_done(d->pair.real, group, count), KVLEAF_OK);
    d->tally.copies += count;
}

void operate_copy_some(driver *d)
{
    int32_t group = driver_choose(d, d->pair.m.p.num_groups), most = driver_choose(d, 3);
    pair_note(&d->pair, "copies of group %d, at most %d", group, most);
    copy_blocks(d, group, most);
}

/* The number of an open step that there is room for, or NO_STEP. */
static int32_t closed_step(const driver *d)
{
    bool open[STEPS] = {false};
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        if (d->pair.m.sequences[i].live && d->step[i] != NO_STEP)
            open[d->step[i]] = true;
    for (int32_t i = 0; i < STEPS; i++)
        if (!open[i])
            return i;
    return NO_STEP;
}

/* Opens a step over some sequences, now and then with one that must not be in it. */
void operate_begin(driver *d)
{
    kvleaf_seq handles[MODEL_SEQUENCES];
    int32_t seqs[MODEL_SEQUENCES], num_q[MODEL_SEQUENCES], n = 0, step = closed_step(d);
    bool careless = driver_one_in(d, 6), late = driver_one_in(d, 4);
    if (step == NO_STEP)
        return;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        const model_sequence *s = &d->pair.m.sequences[i];
        int32_t most = (int32_t)(s->extended - s->committed);
        if (!s->live || driver_choose(d, 2) == 0 || (!careless && (most == 0 || d->step[i] != NO_STEP || s->swapped)))
            continue;
        seqs[n] = i;
        handles[n] = d->pair.handles[i];
        num_q[n++] = driver_choose(d, 3) ? most : 1 + driver_choose(d, most);
    }
    pair_note(&d->pair, "begin step %d of %d sequences%s%s", step, n, careless ? ", careless" : "",
              late ? ", copies later" : "");
    kvleaf_status expected = model_begin(&d->pair.m, seqs, num_q, n);
    if (!driver_answered(d, kvleaf_blocks_step_begin(d->pair.real, handles, num_q, n), expected))
        return;
    for (int32_t i = 0; i < n; i++)
        d->step[seqs[i]] = step;
    for (int32_t group = 0; !late && group < d->pair.m.p.num_groups; group++)
        copy_blocks(d, group, -1);
}

/* The sequences of an open step. */
static int32_t members(const driver *d, int32_t step, int32_t *seqs, kvleaf_seq *handles)
{
    int32_t n = 0;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        if (!d->pair.m.sequences[i].live || d->step[i] != step)
            continue;
        handles[n] = d->pair.handles[i];
        seqs[n++] = i;
    }
    return n;
}

void driver_close_step(driver *d, int32_t step, bool commit)
{
    kvleaf_seq handles[MODEL_SEQUENCES];
    int32_t seqs[MODEL_SEQUENCES], accepted[MODEL_SEQUENCES], n = members(d, step, seqs, handles);
    bool all = driver_choose(d, 3) != 0, careless = driver_one_in(d, 12);
    for (int32_t i = 0; i < n; i++) {
        const model_sequence *s = &d->pair.m.sequences[seqs[i]];
        accepted[i] = driver_choose(d, (int32_t)(s->planned - s->committed) + 1 + careless);
    }
    pair_note(&d->pair, "%s step %d of %d sequences%s", commit ? "commit" : "roll back", step, n,
              all ? "" : " in part");
    kvleaf_status expected, got;
    if (commit) {
        expected = model_commit(&d->pair.m, seqs, all ? NULL : accepted, n);
        got = kvleaf_blocks_step_commit(d->pair.real, handles, all ? NULL : accepted, n);
    } else {
        expected = model_rollback(&d->pair.m, seqs, n);
        got = kvleaf_blocks_step_rollback(d->pair.real, handles, n);
    }
    if (!driver_answered(d, got, expected))
        return;
    for (int32_t i = 0; i < n; i++)
        d->step[seqs[i]] = NO_STEP;
}

void operate_commit(driver *d)
{
    driver_close_step(d, driver_choose(d, STEPS), true);
}

void operate_roll_back(driver *d)
{
    driver_close_step(d, driver_choose(d, STEPS), false);
}

/* Calls that must be refused whatever the state is. */
void operate_misuse(driver *d)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = -1};
    kvleaf_blocks *real = d->pair.real;
    kvleaf_seq stale = d->destroyed, handle = 0;
    int32_t at = driver_sequence(d), one = 1;
    pair_note(&d->pair, "misuse");
    if (at >= 0)
        driver_answered(d, kvleaf_blocks_seq_extend(real, d->pair.handles[at], &tokens, NULL),
                        d->step[at] == NO_STEP && !d->pair.m.sequences[at].swapped ? KVLEAF_INVALID : KVLEAF_BUSY);
    tokens.count = 1;
    const struct {
        kvleaf_seq seq;
        kvleaf_status status;
    } wrong[] = {{0, KVLEAF_INVALID}, {d->foreign, KVLEAF_FOREIGN}, {stale, stale ? KVLEAF_STALE : KVLEAF_INVALID}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        handle = wrong[i].seq;
        driver_answered(d, kvleaf_blocks_seq_extend(real, handle, &tokens, NULL), wrong[i].status);
        driver_answered(d, kvleaf_blocks_seq_truncate(real, handle, 0), wrong[i].status);
        driver_answered(d, kvleaf_blocks_step_begin(real, &handle, &one, 1), wrong[i].status);
        driver_answered(d, kvleaf_blocks_step_commit(real, &handle, NULL, 1), wrong[i].status);
        driver_answered(d, kvleaf_blocks_seq_fork(real, wrong[i].seq, 0, &handle), wrong[i].status);
        handle = wrong[i].seq;
        driver_answered(d, kvleaf_blocks_seq_destroy(real, &handle), wrong[i].status);
    }
}
