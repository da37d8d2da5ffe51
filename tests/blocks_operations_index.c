/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on the prefix index: ids, matches, pins, time. */
#include "blocks_operations.h"

void operate_match(driver *d)
{
    kvleaf_span spans[2];
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = d->ids, .count = driver_choose(d, MODEL_TOKENS / 3)};
    kvleaf_seq_params params = driver_seq_params(d);
    int64_t matched = -1;
    driver_ids(d, driver_choose(d, PROMPTS), 0, tokens.count);
    tokens.spans = spans;
    tokens.num_spans = driver_spans(d, tokens.count, spans);
    pair_note(&d->pair, "match %d tokens", (int)tokens.count);
    int64_t expected = model_prefix_match(&d->pair.m, &params, &tokens);
    if (driver_answered(d, kvleaf_blocks_prefix_match(d->pair.real, &params, &tokens, &matched), KVLEAF_OK) &&
        matched != expected)
        pair_wrong(&d->pair, "%d tokens match, not %d", (int)matched, (int)expected);
}

/* Says ids that were unknown, or others of tokens that are not computed yet; now and then what must be refused. */
void operate_set_ids(driver *d)
{
    int32_t at = driver_sequence(d);
    if (at < 0)
        return;
    const model_sequence *s = &d->pair.m.sequences[at];
    int64_t start = driver_choose(d, (int32_t)s->extended + 1),
            count = driver_choose(d, (int32_t)(s->extended - start) + 1);
    bool honest = !driver_one_in(d, 6);
    if (honest && driver_choose(d, 2)) { /* all of them */
        start = 0;
        count = s->extended;
    }
    for (int64_t i = 0; i < count; i++)
        d->ids[i] = start + i < s->committed || driver_choose(d, 4) ? s->tokens[start + i].id : driver_choose(d, WORDS);
    if (!honest && driver_one_in(d, 2))
        count = s->extended - start + 1;
    for (int64_t i = 0; !honest && i < count && start + i < s->committed; i++)
        if (s->tokens[start + i].known)
            d->ids[i] = WORDS;
    pair_note(&d->pair, "set %d ids of %d from %d%s", (int)count, at, (int)start, honest ? "" : ", wrong ones");
    kvleaf_status expected = model_set_ids(&d->pair.m, at, start, d->ids, count);
    driver_answered(d, kvleaf_blocks_seq_set_ids(d->pair.real, d->pair.handles[at], start, d->ids, count), expected);
}

void operate_clear(driver *d)
{
    if (!driver_one_in(d, 10))
        return;
    pair_note(&d->pair, "clear");
    model_prefix_clear(&d->pair.m);
    driver_answered(d, kvleaf_blocks_prefix_clear(d->pair.real), KVLEAF_OK);
}

void operate_pin(driver *d)
{
    int32_t group = driver_choose(d, d->pair.m.p.num_groups);
    int32_t block = driver_choose(d, d->pair.m.p.groups[group].num_blocks + 2) - 1;
    pair_note(&d->pair, "pin block %d of group %d", block, group);
    kvleaf_status expected = model_pin(&d->pair.m, group, block);
    driver_answered(d, kvleaf_blocks_pin(d->pair.real, group, block), expected);
}

/* A pinned block where there is one. */
void operate_unpin(driver *d)
{
    int32_t group = driver_choose(d, d->pair.m.p.num_groups), count = d->pair.m.p.groups[group].num_blocks;
    int32_t block = driver_choose(d, count + 2) - 1;
    for (int32_t i = 0; i < count && !driver_one_in(d, 20); i++, block = (block + 1) % count)
        if (block >= 0 && block < count && d->pair.m.groups[group].pins[block])
            break;
    pair_note(&d->pair, "unpin block %d of group %d", block, group);
    kvleaf_status expected = model_unpin(&d->pair.m, group, block);
    driver_answered(d, kvleaf_blocks_unpin(d->pair.real, group, block), expected);
}

void operate_wait(driver *d)
{
    int32_t ms = 20 * driver_choose(d, 4); /* so that times end to the millisecond */
    pair_note(&d->pair, "wait %d ms", ms);
    d->pair.m.now_ms += (uint64_t)ms;
}
