/* SPDX-License-Identifier: Apache-2.0 */
/* The figures that only ask the block manager or count bytes. */
#include "tour.h"

#include <stdio.h>
#include <stdlib.h>

#define STREAM_SEQS  24
#define STREAM_STEPS 4000
#define RESERVED     2048

void figure_waste(tour *t)
{
    enum { BLOCK = 16 };
    kvleaf_blocks *blocks = NULL;
    kvleaf_seq seqs[STREAM_SEQS] = {0};
    int64_t lengths[STREAM_SEQS] = {0}, paged = 0, reserved = 0, held = 0;
    uint32_t random = 8;
    bool only_last = true;

    tour_begin(t, 8, "Waste over a stream of requests", "002");
    MUST(kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 4096, .block_size = BLOCK), &blocks));
    for (int step = 0; step < STREAM_STEPS; step++) {
        kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
        int64_t in_last = 0, live = 0;

        random = random * 1664525u + 1013904223u;
        int i = (int)(random >> 16) % STREAM_SEQS;
        kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = 1 + (int64_t)(random >> 24) / 4};
        if (seqs[i] && lengths[i] + tokens.count > RESERVED - (int64_t)(random >> 21)) {
            MUST(kvleaf_blocks_seq_destroy(blocks, &seqs[i]));
            lengths[i] = 0;
        } else {
            if (!seqs[i])
                MUST(kvleaf_blocks_seq_create(blocks, NULL, &seqs[i]));
            MUST(kvleaf_blocks_seq_extend(blocks, seqs[i], &tokens, NULL));
            lengths[i] += tokens.count;
        }
        for (int j = 0; j < STREAM_SEQS; j++) {
            in_last += (BLOCK - lengths[j] % BLOCK) % BLOCK;
            live += seqs[j] != 0;
        }
        MUST(kvleaf_blocks_query(blocks, &stats));
        only_last = only_last && stats.slots_wasted == in_last;
        paged += stats.slots_wasted;
        held += stats.tokens;
        reserved += live * RESERVED - stats.tokens;
    }
    double paged_percent = 100.0 * (double)paged / (double)(paged + held);
    double reserved_percent = 100.0 * (double)reserved / (double)(reserved + held);
    cJSON_AddNumberToObject(t->row, "waste_paged_percent", paged_percent);
    cJSON_AddNumberToObject(t->row, "waste_reserved_percent", reserved_percent);
    tour_say(t, "%d steps of requests that come, grow and go: %.1f%% of the slots in used blocks hold nothing;",
             STREAM_STEPS, paged_percent);
    tour_say(t, "with %d slots reserved for each request it would be %.0f%%.", RESERVED, reserved_percent);
    tour_check(t, only_last, "after every step the unused slots are those of last blocks and no others");
    tour_end(t);
    kvleaf_blocks_destroy(&blocks);
}

void figure_size(tour *t)
{
    kvleaf_pool_bytes bytes = {.struct_size = sizeof bytes};

    tour_begin(t, 9, "Size of one sequence of a 13-billion-parameter LLaMA", "002");
    tour_say(t, "40 layers, 40 heads, dim 128, 16-bit, 2048 tokens: a pool of 128 blocks of 16.");
    MUST(kvleaf_pool_size(NULL,
                          kvleaf_pool_params(.num_layers = 40, .num_blocks = 128, .block_size = 16, .num_kv_heads = 40,
                                             .head_dim_k = 128, .dtype = KVLEAF_F16),
                          &bytes));
    cJSON_AddNumberToObject(t->row, "bytes", (double)bytes.total_bytes);
    tour_say(t, "%llu bytes", (unsigned long long)bytes.total_bytes);
    tour_check(t, bytes.total_bytes == 1677721600, "1,677,721,600 bytes: 1.7 GB");
    tour_end(t);
}
