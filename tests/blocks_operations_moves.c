/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that move sequences: beams dealt anew, swaps. */
#include "blocks_operations.h"

/* Deals some sequences anew, now and then with one that must not be among them. */
void operate_rearrange(driver *d)
{
    kvleaf_seq handles[MODEL_SEQUENCES + 1];
    int32_t seqs[MODEL_SEQUENCES + 1], parents[MODEL_SEQUENCES + 1], prompts[MODEL_SEQUENCES + 1], n = 0;
    bool careless = driver_one_in(d, 4);
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        const model_sequence *s = &d->pair.m.sequences[i];
        bool right = s->committed == s->extended && !s->swapped;
        if (s->live && (right || careless) && driver_choose(d, 2))
            seqs[n++] = i;
    }
    if (careless && n > 0 && driver_one_in(d, 4))
        seqs[n++] = seqs[0];
    for (int32_t i = 0; i < n; i++) {
        handles[i] = d->pair.handles[seqs[i]];
        parents[i] = driver_choose(d, n + (careless && driver_one_in(d, 8)));
    }
    pair_note(&d->pair, "rearrange %d sequences%s", n, careless ? ", careless" : "");
    kvleaf_status expected = model_rearrange(&d->pair.m, seqs, parents, n);
    if (!driver_answered(d, kvleaf_blocks_seq_rearrange(d->pair.real, handles, parents, n), expected))
        return;
    for (int32_t i = 0; i < n; i++)
        prompts[i] = d->prompt[seqs[parents[i]]];
    for (int32_t i = 0; i < n; i++)
        d->prompt[seqs[i]] = prompts[i];
}

void driver_swap(driver *d, int32_t at, bool out, bool done)
{
    const kvleaf_swap_copy *copies = NULL;
    int32_t count = -1;
    kvleaf_blocks *real = d->pair.real;
    kvleaf_seq seq = d->pair.handles[at];
    pair_note(&d->pair, "swap %d %s%s", at, out ? "out" : "in", done ? "" : ", not done");
    kvleaf_status expected = out ? model_swap_out_status(&d->pair.m, at) : model_swap_in_status(&d->pair.m, at);
    kvleaf_status got =
        out ? kvleaf_blocks_swap_out(real, seq, &copies, &count) : kvleaf_blocks_swap_in(real, seq, &copies, &count);
    if (!driver_answered(d, got, expected))
        return;
    bool right =
        out ? model_swap_out(&d->pair.m, at, copies, count, done) : model_swap_in(&d->pair.m, at, copies, count, done);
    if (!right)
        pair_wrong(&d->pair, "the %d copies of the swap are not those that are needed", count);
    driver_answered(d, kvleaf_blocks_swap_end(real, seq, done), KVLEAF_OK);
    d->tally.swaps += done;
    d->tally.swapped_blocks += done ? count : 0;
}

/* A sequence that is not where it is to go, if one is met soon. */
static void swap(driver *d, bool out)
{
    int32_t at = driver_sequence(d);
    for (int32_t tries = 0; at >= 0 && tries < MODEL_SEQUENCES && d->pair.m.sequences[at].swapped == out; tries++)
        at = driver_sequence(d);
    if (at >= 0)
        driver_swap(d, at, out, !driver_one_in(d, 4));
}

void operate_swap_out(driver *d)
{
    swap(d, true);
}

void operate_swap_in(driver *d)
{
    swap(d, false);
}
