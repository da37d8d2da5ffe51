/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a caller's batch and turns it into a step of the engine. */
#include "attention/attention.h"

#include <limits.h>

static bool paged(const kvleaf_attention *attention)
{
    return attention->params.geometry.block_size > 0;
}

static bool on_device(const kvleaf_batch *batch)
{
    return batch->device_block_table || batch->device_seq_lens_k;
}

static int32_t seqlen_q(const kvleaf_batch *batch, int32_t seq)
{
    return batch->cu_seqlens_q[seq + 1] - batch->cu_seqlens_q[seq];
}

static int32_t seqlen_k(const kvleaf_batch *batch, int32_t seq)
{
    return batch->seq_lens_k ? batch->seq_lens_k[seq] : batch->cu_seqlens_k[seq + 1] - batch->cu_seqlens_k[seq];
}

/* The first key that some row of a sequence sees: the table need not say where those before it lie. */
static int64_t first_key(const kvleaf_attention *attention, const kvleaf_batch *batch, int32_t seq)
{
    int64_t window = attention->params.geometry.window;
    int64_t first = (int64_t)seqlen_k(batch, seq) - seqlen_q(batch, seq) - window + 1;
    return window && first > 0 ? first : 0;
}

static kvleaf_status check_cumulative(const char *field, const int32_t *cumulative, int32_t count)
{
    if (!cumulative)
        return kvl_fail_null(field);
    if (cumulative[0])
        return kvl_fail(KVLEAF_INVALID, field, cumulative[0], 0, "%s[0] is %d, must be 0", field, cumulative[0]);
    for (int32_t i = 0; i < count; i++) {
        if (cumulative[i + 1] < cumulative[i])
            return kvl_fail(KVLEAF_INVALID, field, cumulative[i + 1], cumulative[i],
                            "%s[%d] is %d, below the one before, %d", field, i + 1, cumulative[i + 1], cumulative[i]);
    }
    return KVLEAF_OK;
}

/* The sources of K lengths and tables: which are given must fit the object. */
static kvleaf_status check_sources(const kvleaf_attention *attention, const kvleaf_batch *batch)
{
    if (!paged(attention)) {
        if (batch->block_table || batch->seq_lens_k || on_device(batch) || batch->slot_mapping)
            return kvl_fail(KVLEAF_INVALID, "block_table", 1, 0,
                            "the object is for contiguous K/V: block_table, seq_lens_k and slot_mapping must be NULL");
        return check_cumulative("cu_seqlens_k", batch->cu_seqlens_k, batch->num_seqs);
    }
    if (!batch->seq_lens_k)
        return kvl_fail_null("seq_lens_k");
    if (batch->num_blocks < 1)
        return kvl_fail_range("num_blocks", batch->num_blocks, 1, INT_MAX);
    if (!attention->params.geometry.device_tables) {
        if (on_device(batch))
            return kvl_fail(KVLEAF_INVALID, "device_tables", 0, 1,
                            "device-resident tables need an object made with device_tables 1");
        return batch->block_table ? KVLEAF_OK : kvl_fail_null("block_table");
    }
    if (batch->block_table || !batch->device_block_table)
        return kvl_fail(KVLEAF_INVALID, "device_block_table", 0, 1,
                        "the object is for device-resident tables: device_block_table must be given, block_table NULL");
    if (batch->device_block_table_offset % sizeof(int32_t) || batch->device_seq_lens_k_offset % sizeof(int32_t))
        return kvl_fail(KVLEAF_INVALID, "device_block_table_offset", (int64_t)batch->device_block_table_offset,
                        sizeof(int32_t), "offsets of device-resident tables must be multiples of 4 bytes");
    return KVLEAF_OK;
}

static kvleaf_status check_enum(const char *field, int32_t seq, int64_t value, int64_t high)
{
    return value < 0 || value > high ? kvl_fail(KVLEAF_INVALID, field, value, high, "%s[%d] is %lld, must be 0 .. %lld",
                                                field, seq, (long long)value, (long long)high)
                                     : KVLEAF_OK;
}

/* One sequence: lengths, the ids of the blocks it reaches. */
static kvleaf_status check_seq(const kvleaf_attention *attention, const kvleaf_batch *batch, int32_t seq)
{
    int32_t keys = seqlen_k(batch, seq), block_size = attention->params.geometry.block_size;
    if (keys < 0)
        return kvl_fail(KVLEAF_INVALID, "seq_lens_k", keys, 0, "seq_lens_k[%d] is %d, must not be negative", seq, keys);
    if (keys > attention->params.max_context)
        return kvl_fail(KVLEAF_TOO_SMALL, "max_context", keys, attention->params.max_context,
                        "sequence %d has %d keys, max_context allows %d", seq, keys, attention->params.max_context);
    kvleaf_status status = KVLEAF_OK;
    if (batch->families)
        status = check_enum("families", seq, batch->families[seq], KVLEAF_FAMILY_DECODE);
    if (!status && batch->masks)
        status = check_enum("masks", seq, batch->masks[seq], KVLEAF_MASK_NONE);
    if (status || !paged(attention))
        return status;
    int64_t blocks = kvl_ceil_div(keys, block_size);
    if (blocks > batch->block_table_stride)
        return kvl_fail(KVLEAF_INVALID, "block_table_stride", batch->block_table_stride, blocks,
                        "sequence %d has %d keys in %lld blocks, a row of the block table has %lld entries", seq, keys,
                        (long long)blocks, (long long)batch->block_table_stride);
    for (int64_t i = first_key(attention, batch, seq) / block_size; batch->block_table && i < blocks; i++) {
        int32_t id = batch->block_table[seq * batch->block_table_stride + i];
        if (id < 0 || id >= batch->num_blocks)
            return kvl_fail(KVLEAF_INVALID, "block_table", id, batch->num_blocks - 1,
                            "block_table[%d][%lld] is %d, must be 0 .. %d", seq, (long long)i, id,
                            batch->num_blocks - 1);
    }
    return KVLEAF_OK;
}

static kvleaf_status check_slots(const kvleaf_attention *attention, const kvleaf_batch *batch, int32_t total_q)
{
    int64_t slots = (int64_t)batch->num_blocks * attention->params.geometry.block_size;
    for (int32_t i = 0; batch->slot_mapping && i < total_q; i++) {
        if (batch->slot_mapping[i] >= slots)
            return kvl_fail(KVLEAF_INVALID, "slot_mapping", batch->slot_mapping[i], slots - 1,
                            "slot_mapping[%d] is %lld, the last slot is %lld", i, (long long)batch->slot_mapping[i],
                            (long long)(slots - 1));
    }
    return KVLEAF_OK;
}

static kvleaf_status check_batch(const kvleaf_attention *attention, const kvleaf_batch *batch)
{
    kvleaf_status status =
        batch ? kvl_check_struct(batch, batch->struct_size, sizeof *batch, "batch") : kvl_fail_null("batch");
    if (status)
        return status;
    if (batch->num_seqs < 0)
        return kvl_fail_range("num_seqs", batch->num_seqs, 0, attention->params.max_seqs);
    if (batch->num_seqs > attention->params.max_seqs)
        return kvl_fail(KVLEAF_TOO_SMALL, "max_seqs", batch->num_seqs, attention->params.max_seqs,
                        "the batch has %d sequences, max_seqs allows %d", batch->num_seqs, attention->params.max_seqs);
    if (batch->num_seqs == 0)
        return KVLEAF_OK;
    status = check_cumulative("cu_seqlens_q", batch->cu_seqlens_q, batch->num_seqs);
    if (!status)
        status = check_sources(attention, batch);
    int32_t total_q = status ? 0 : batch->cu_seqlens_q[batch->num_seqs];
    if (!status && total_q > attention->params.max_tokens)
        status = kvl_fail(KVLEAF_TOO_SMALL, "max_tokens", total_q, attention->params.max_tokens,
                          "the batch has %d query rows, max_tokens allows %d", total_q, attention->params.max_tokens);
    for (int32_t i = 0; i < batch->num_seqs && !status; i++)
        status = check_seq(attention, batch, i);
    return status ? status : check_slots(attention, batch, total_q);
}

/* Rooms the batch needs in the staging slot. */
static kvl_counts counts_of(const kvleaf_attention *attention, const kvleaf_batch *batch)
{
    kvl_counts counts = {0};
    if (!paged(attention) || !batch->num_seqs)
        return counts;
    if (batch->block_table || batch->slot_mapping)
        counts.num_slots = batch->cu_seqlens_q[batch->num_seqs];
    for (int32_t i = 0; batch->block_table && i < batch->num_seqs; i++)
        counts.num_table += kvl_ceil_div(seqlen_k(batch, i), attention->params.geometry.block_size);
    return counts;
}

/* The slots of a sequence's new tokens: as given, or its last seqlen_q positions; negative for one before its start.
 * Whether all are in place, or negative. */
static bool fill_slots(const kvleaf_batch *batch, int32_t seq, int32_t block_size, int64_t *slots)
{
    bool in_place = true;
    int32_t first = batch->cu_seqlens_q[seq], queries = seqlen_q(batch, seq), keys = seqlen_k(batch, seq);
    const int32_t *row = batch->block_table ? batch->block_table + seq * batch->block_table_stride : NULL;
    for (int32_t i = 0; i < queries; i++) {
        int32_t position = keys - queries + i;
        int64_t place = -1;
        if (row && position >= 0)
            place = (int64_t)row[position / block_size] * block_size + position % block_size;
        slots[first + i] = batch->slot_mapping ? batch->slot_mapping[first + i] : place;
        in_place = in_place && (slots[first + i] < 0 || slots[first + i] == place);
    }
    return in_place;
}

/* Fills the staged sections and the step's sequences. Returns what is known of the slots. */
static kvl_ownership fill(kvleaf_attention *attention, const kvleaf_batch *batch, const kvl_counts *counts,
                          kvl_staging *staging)
{
    kvl_ownership slots = counts->num_slots ? KVL_SLOTS_IN_PLACE : KVL_SLOTS_ANYWHERE;
    int32_t block_size = attention->params.geometry.block_size;
    int64_t table = 0;
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        int32_t keys = seqlen_k(batch, i);
        kvl_step_seq *seq = &attention->seqs[i];
        *seq = (kvl_step_seq){
            .q_len = seqlen_q(batch, i),
            .kv_len = keys,
            .family = batch->families ? batch->families[i] : 0,
            .mask = batch->masks ? batch->masks[i] : 0,
        };
        if (!block_size) {
            seq->table = batch->cu_seqlens_k[i];
            continue;
        }
        if (counts->num_slots && !fill_slots(batch, i, block_size, staging->slots))
            slots = KVL_SLOTS_ANYWHERE;
        if (batch->device_block_table) {
            seq->table = (int32_t)((int64_t)(batch->device_block_table_offset / sizeof(int32_t)) +
                                   i * batch->block_table_stride);
            continue;
        }
        seq->table = (int32_t)table;
        seq->blocks = batch->block_table + i * batch->block_table_stride;
        for (int64_t k = 0; k < kvl_ceil_div(keys, block_size); k++)
            staging->table[table++] = batch->block_table[i * batch->block_table_stride + k];
    }
    return slots;
}

/* Device-resident arrays must reach as far as the host's bounds say. */
static kvleaf_status check_device_arrays(const kvleaf_attention *attention, const kvleaf_batch *batch)
{
    const kvleaf_opencl *cl = attention->device->cl;
    const struct {
        const char *field;
        cl_mem memory;
        uint64_t needed;
    } arrays[] = {
        {"device_block_table", batch->device_block_table,
         batch->device_block_table_offset +
             (uint64_t)batch->num_seqs * (uint64_t)batch->block_table_stride * sizeof(int32_t)},
        {"device_seq_lens_k", batch->device_seq_lens_k,
         batch->device_seq_lens_k_offset + (uint64_t)batch->num_seqs * sizeof(int32_t)},
    };
    for (int i = 0; i < 2; i++) {
        size_t size = 0;
        if (!arrays[i].memory || !batch->num_seqs)
            continue;
        cl_int error = cl->GetMemObjectInfo(arrays[i].memory, CL_MEM_SIZE, sizeof size, &size, NULL);
        if (error)
            return kvl_fail(KVLEAF_INVALID, arrays[i].field, error, 0, "%s is no OpenCL buffer", arrays[i].field);
        if (arrays[i].needed > size || arrays[i].needed / sizeof(int32_t) > INT32_MAX)
            return kvl_fail(KVLEAF_TOO_SMALL, arrays[i].field, (int64_t)size, (int64_t)arrays[i].needed,
                            "%s holds %zu bytes, the batch reaches %llu", arrays[i].field, size,
                            (unsigned long long)arrays[i].needed);
    }
    return KVLEAF_OK;
}

kvleaf_status kvleaf_attention_plan(kvleaf_attention *attention, const kvleaf_batch *batch, const kvleaf_exec *exec)
{
    kvl_chain chain;
    kvleaf_status status = kvl_attention_begin(attention, exec, &chain);
    if (!status)
        status = check_batch(attention, batch);
    if (!status)
        status = check_device_arrays(attention, batch);
    if (status)
        return status;
    kvl_counts counts = counts_of(attention, batch);
    kvl_staging staging;
    status = kvl_engine_begin(attention->engine, &counts, &staging);
    if (status)
        return status;
    kvl_ownership slots = fill(attention, batch, &counts, &staging);
    const kvl_step step = {
        .seqs = attention->seqs,
        .num_seqs = batch->num_seqs,
        .num_blocks = batch->num_blocks,
        .table = batch->device_block_table,
        .device_lens = batch->device_seq_lens_k,
        .device_lens_first = (int64_t)(batch->device_seq_lens_k_offset / sizeof(int32_t)),
        .slots = slots,
    };
    return kvl_chain_end(&chain, kvl_engine_submit(attention->engine, &step, &chain));
}
