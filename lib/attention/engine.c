/* SPDX-License-Identifier: Apache-2.0 */
/* Creation, staging and submission of steps. Launches are in launch.c. */
#include "attention/state.h"

#include "common/plan.h"

#include <string.h>

#define PARTIAL_BYTES sizeof(float)
#define PADDED_DIM    64 /* a variant may work on head_dim rounded up to this */
#define PART_INTS     64 /* a part of the device buffer begins at a multiple */
#define BUCKETS_A_ROW 4  /* a power of two of them, at least twice the rows */
#define UPDATE_GROUP  64 /* work-items a work-group of the table kernel */

static bool builds(const kvl_engine_params *params, kvl_operation operation)
{
    return params->operations & (1u << operation);
}

static uint64_t partials_bytes(const kvl_engine *engine)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    uint64_t bytes, partials = (uint64_t)engine->capacity.splits + (kvl_folds_itself(engine) ? SPARE_PARTIALS : 0);
    if (!builds(&engine->params, KVL_DECODE))
        return 0;
    if (!kvl_mul(partials * PARTIAL_BYTES, (uint64_t)geometry->num_heads, &bytes) ||
        !kvl_mul(bytes, PARTIAL_STRIDE((uint64_t)kvl_ceil_div(geometry->head_dim, PADDED_DIM) * PADDED_DIM), &bytes))
        return UINT64_MAX;
    return bytes;
}

static int64_t whole_parts(int64_t ints)
{
    return kvl_ceil_div(ints, PART_INTS) * PART_INTS;
}

/* Tile shape, capacities and the parts of the device buffer, which follow from the params and the chosen variants. */
static kvleaf_status derive(kvl_engine *engine)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    int32_t group = geometry->num_heads / geometry->num_kv_heads;
    int32_t rows = engine->chosen[KVL_PREFILL].variant->tile_rows;
    engine->tile_heads = group < rows ? group : rows;
    int32_t room = 1;
    while (room < engine->tile_heads)
        room *= 2;
    engine->tile_queries = rows / (engine->chosen[KVL_PREFILL].variant->power_heads ? room : engine->tile_heads);
    int32_t parts = engine->chosen[KVL_PREFILL].variant->tile_parts;
    engine->tile_part = engine->tile_queries / (parts ? parts : 1);
    kvleaf_status status = kvl_schedule_capacity(engine, &engine->capacity);
    const kvl_capacity *capacity = &engine->capacity;
    int64_t counters = kvl_folds_itself(engine) ? capacity->rows * geometry->num_kv_heads * FOLD_COUNTERS : 0;
    int64_t behind = whole_parts(capacity->ints);
    engine->workspace = (cl_long2){{behind, behind + whole_parts(counters)}};
    return status;
}

static uint64_t device_bytes(const kvl_engine *engine)
{
    uint64_t bytes;
    bool fits = kvl_add((uint64_t)engine->workspace.s[1] * sizeof(int32_t), partials_bytes(engine), &bytes);
    return fits ? bytes : UINT64_MAX;
}

static uint64_t host_bytes(const kvl_engine *engine)
{
    const kvl_engine_params *params = &engine->params;
    uint64_t slot = sizeof(kvl_staging_slot) + (uint64_t)engine->capacity.ints * sizeof(int32_t);
    uint64_t row = sizeof(kvl_row) + (3 + BUCKETS_A_ROW) * sizeof(int32_t);
    return sizeof *engine + slot * (uint64_t)params->steps_in_flight + (uint64_t)params->max_seqs * sizeof(int32_t) +
           row * (uint64_t)engine->capacity.rows;
}

/* The variant of each operation as the device would choose it, without building: for sizes, the first that is not
 * refused. */
static void guess(kvl_engine *engine)
{
    for (int operation = 0; operation < KVL_OPERATIONS; operation++) {
        int count;
        const kvl_variant *table = kvl_variants((kvl_operation)operation, &count);
        engine->chosen[operation].variant = table;
        for (int i = 0; i < count; i++) {
            if (!table[i].refuses(&engine->device->caps, &engine->params.geometry))
                engine->chosen[operation].variant = &table[i];
        }
    }
}

kvleaf_status kvl_engine_size(const kvleaf_device *device, const kvl_engine_params *params, uint64_t *device_size,
                              uint64_t *host_size)
{
    kvl_engine engine = {.device = (kvleaf_device *)device, .params = *params};
    guess(&engine);
    kvleaf_status status = derive(&engine);
    if (status)
        return status;
    *device_size = device_bytes(&engine);
    *host_size = host_bytes(&engine);
    return KVLEAF_OK;
}

static kvleaf_status choose(kvl_engine *engine)
{
    for (int operation = 0; operation < KVL_OPERATIONS; operation++) {
        int count;
        const kvl_variant *table = kvl_variants((kvl_operation)operation, &count);
        engine->chosen[operation].variant = table; /* sizes below read a row of every operation */
        if (!builds(&engine->params, (kvl_operation)operation))
            continue;
        kvleaf_status status =
            kvl_variant_choose(engine->device, table, count, &engine->params.geometry, &engine->chosen[operation]);
        if (status)
            return status;
    }
    return KVLEAF_OK;
}

static kvleaf_status make_kernels(kvl_engine *engine)
{
    cl_program table_program = NULL, resolve_program = NULL;
    kvleaf_status status = KVLEAF_OK;
    if (engine->params.max_updates)
        status =
            kvl_device_program(engine->device, "portable/table.cl", "-cl-std=CL1.2 -DWORK_GROUP=64", &table_program);
    if (!status && engine->params.geometry.device_tables)
        status = kvl_device_program(engine->device, "portable/resolve.cl", "-cl-std=CL1.2", &resolve_program);
    const struct {
        cl_program program;
        const char *name;
        cl_kernel *kernel;
    } wanted[] = {
        {engine->chosen[KVL_APPEND].program, "kvl_append", &engine->append.handle},
        {engine->chosen[KVL_DECODE].program, "kvl_decode", &engine->decode.handle},
        {kvl_folds_itself(engine) ? NULL : engine->chosen[KVL_DECODE].program, "kvl_fold", &engine->fold.handle},
        {engine->chosen[KVL_PREFILL].program, "kvl_prefill", &engine->prefill.handle},
        {engine->chosen[KVL_GATHER].program, "kvl_gather", &engine->gather.handle},
        {engine->chosen[KVL_MERGE].program, "kvl_merge", &engine->merge.handle},
        {table_program, "kvl_table_update", &engine->update.handle},
        {resolve_program, "kvl_resolve", &engine->resolve.handle},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted && !status; i++) {
        if (wanted[i].program)
            status = kvl_device_kernel(engine->device, wanted[i].program, wanted[i].name, wanted[i].kernel);
    }
    return status;
}

/* A kernel that folds leaves the counters of rows at zero, and may expect and leave every partial absent, as
 * cl_kernels/nvidia/decode_runs.clh does: so they are made so once. */
static kvleaf_status clear_workspace(kvl_engine *engine)
{
    const kvleaf_opencl *cl = engine->device->cl;
    const cl_uint zero = 0, absent = 0xffffffffu;
    cl_command_queue queue = NULL;
    kvleaf_status status = kvleaf_device_queue_create(engine->device, &queue);
    if (status)
        return status;
    size_t counters = (size_t)engine->workspace.s[0] * sizeof zero;
    size_t partials = (size_t)engine->workspace.s[1] * sizeof zero;
    cl_int error =
        cl->EnqueueFillBuffer(queue, engine->meta, &zero, sizeof zero, counters, partials - counters, 0, NULL, NULL);
    if (!error)
        error = cl->EnqueueFillBuffer(queue, engine->meta, &absent, sizeof absent, partials,
                                      (size_t)partials_bytes(engine), 0, NULL, NULL);
    if (!error)
        error = cl->Finish(queue);
    cl->ReleaseCommandQueue(queue);
    return error ? kvl_fail_opencl("clEnqueueFillBuffer", error) : KVLEAF_OK;
}

static kvleaf_status make_buffers(kvl_engine *engine)
{
    const kvl_engine_params *params = &engine->params;
    const kvleaf_allocator *allocator = &engine->device->allocator;
    size_t ints = (size_t)engine->capacity.ints;
    kvleaf_status status =
        kvl_device_buffer(engine->device, "the plan's tables with the workspace of decode (max_decode_keys)",
                          device_bytes(engine), &engine->meta);
    if (!status && builds(params, KVL_DECODE) && kvl_folds_itself(engine))
        status = clear_workspace(engine);
    if (status)
        return status;
    engine->order = kvl_alloc(allocator, (size_t)params->max_seqs, sizeof *engine->order);
    engine->slots = kvl_alloc(allocator, (size_t)params->steps_in_flight, sizeof *engine->slots);
    if (!engine->order || !engine->slots)
        return kvl_fail_memory((size_t)params->max_seqs * sizeof *engine->order);
    size_t rows = (size_t)engine->capacity.rows;
    engine->rows = kvl_alloc(allocator, rows, sizeof *engine->rows);
    engine->row_order = kvl_alloc(allocator, rows, sizeof *engine->row_order);
    engine->shared = kvl_alloc(allocator, rows, sizeof *engine->shared);
    engine->keys = kvl_alloc(allocator, rows, sizeof *engine->keys);
    engine->buckets = kvl_alloc(allocator, rows, BUCKETS_A_ROW * sizeof *engine->buckets);
    if (!engine->rows || !engine->row_order || !engine->shared || !engine->keys || !engine->buckets)
        return kvl_fail_memory(rows * sizeof *engine->rows);
    for (int32_t i = 0; i < params->steps_in_flight; i++) {
        engine->slots[i].host = kvl_alloc(allocator, ints, sizeof(int32_t));
        if (!engine->slots[i].host)
            return kvl_fail_memory(ints * sizeof(int32_t));
    }
    return KVLEAF_OK;
}

void kvl_engine_set_units(kvl_engine *engine, cl_uint units)
{
    engine->units = units ? units : engine->device->caps.compute_units;
}

kvleaf_status kvl_engine_create(kvleaf_device *device, const kvl_engine_params *params, kvl_engine **out)
{
    kvl_engine *engine = kvl_alloc(&device->allocator, 1, sizeof *engine);
    if (!engine)
        return kvl_fail_memory(sizeof *engine);
    engine->device = device;
    engine->params = *params;
    kvl_engine_set_units(engine, 0);
    kvl_device_retain(device);
    kvleaf_status status = choose(engine);
    if (!status)
        status = derive(engine);
    if (!status)
        status = make_kernels(engine);
    if (!status)
        status = make_buffers(engine);
    if (status) {
        kvl_engine_destroy(&engine);
        return status;
    }
    *out = engine;
    return KVLEAF_OK;
}

/* A staging slot's memory may still be read by an upload in flight; only destruction has to wait for that. */
static void release_slots(kvl_engine *engine)
{
    const kvleaf_opencl *cl = engine->device->cl;
    for (int32_t i = 0; engine->slots && i < engine->params.steps_in_flight; i++) {
        if (engine->slots[i].uploaded) {
            cl->WaitForEvents(1, &engine->slots[i].uploaded);
            cl->ReleaseEvent(engine->slots[i].uploaded);
        }
        kvl_free(&engine->device->allocator, engine->slots[i].host);
    }
    kvl_free(&engine->device->allocator, engine->slots);
}

void kvl_engine_destroy(kvl_engine **at)
{
    kvl_engine *engine = at ? *at : NULL;
    if (!engine)
        return;
    *at = NULL;
    kvleaf_device *device = engine->device;
    kvl_kernel *kernels[] = {&engine->append, &engine->decode, &engine->fold,   &engine->prefill,
                             &engine->gather, &engine->merge,  &engine->update, &engine->resolve};
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (kernels[i]->handle)
            device->cl->ReleaseKernel(kernels[i]->handle);
    }
    release_slots(engine);
    if (engine->meta)
        device->cl->ReleaseMemObject(engine->meta);
    void *arrays[] = {engine->order, engine->rows, engine->row_order, engine->shared, engine->keys, engine->buckets};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        kvl_free(&device->allocator, arrays[i]);
    kvl_free(&device->allocator, engine);
    kvl_device_release(device);
}

const char *kvl_engine_variant(const kvl_engine *engine, const char *operation)
{
    for (int i = 0; i < KVL_OPERATIONS; i++) {
        if (builds(&engine->params, (kvl_operation)i) && strcmp(kvl_operation_name((kvl_operation)i), operation) == 0)
            return engine->chosen[i].key;
    }
    return "";
}

/* Whether a slot's upload is over; then its event is released. */
static kvleaf_status look_at_slot(kvl_engine *engine, kvl_staging_slot *slot, bool *over)
{
    const kvleaf_opencl *cl = engine->device->cl;
    cl_int state = CL_COMPLETE;
    if (slot->uploaded) {
        cl_int error = cl->GetEventInfo(slot->uploaded, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL);
        if (error)
            return kvl_fail_opencl("clGetEventInfo", error);
    }
    *over = state <= CL_COMPLETE;
    if (*over && slot->uploaded) {
        cl->ReleaseEvent(slot->uploaded);
        slot->uploaded = NULL;
    }
    if (state >= CL_COMPLETE)
        return KVLEAF_OK;
    engine->failure = state;
    return kvl_fail_device("the upload of an earlier step", state);
}

/* A slot whose upload is over, or NULL. All are looked at, so that a failure shows at the next step. */
static kvleaf_status free_slot(kvl_engine *engine, kvl_staging_slot **out)
{
    *out = NULL;
    for (int32_t i = 0; i < engine->params.steps_in_flight; i++) {
        bool over = false;
        kvleaf_status status = look_at_slot(engine, &engine->slots[i], &over);
        if (status)
            return status;
        if (over && !*out)
            *out = &engine->slots[i];
    }
    return KVLEAF_OK;
}

cl_int kvl_engine_failure(const kvl_engine *engine)
{
    return engine->failure;
}

kvleaf_status kvl_engine_begin(kvl_engine *engine, const kvl_counts *counts, kvl_staging *out)
{
    kvl_schedule at;
    kvl_staging_slot *slot;
    kvleaf_status status = kvl_schedule_begin(engine, counts, &at);
    if (!status)
        status = free_slot(engine, &slot);
    if (status)
        return status;
    if (!slot)
        return kvl_fail(KVLEAF_BUSY, "steps_in_flight", engine->params.steps_in_flight, engine->params.steps_in_flight,
                        "all %d staging slots are still in flight", engine->params.steps_in_flight);
    engine->open = slot;
    engine->begun = at;
    if (engine->now.slots == KVL_SLOTS_IN_PLACE) /* to find out more takes what this step overwrites */
        engine->now.slots = KVL_SLOTS_ANYWHERE;
    *out = (kvl_staging){
        .slots = (int64_t *)(void *)(slot->host + at.slots_at),
        .updates = slot->host + at.updates_at,
        .copies = slot->host + at.copies_at,
        .table = slot->host + at.table_at,
    };
    return KVLEAF_OK;
}

static kvleaf_status run_updates(kvl_engine *engine, const kvl_schedule *at, kvl_chain *chain)
{
    cl_int4 work = {{at->updates_at, at->counts.num_updates, 0, 0}};
    const kvl_arg args[] = {KVL_ARG(at->table), KVL_ARG_KEPT(engine->meta), KVL_ARG_KEPT(work)};
    kvleaf_status status = kvl_kernel_update(engine->device, &engine->update, args, 3);
    if (status)
        return status;
    size_t local = UPDATE_GROUP, global = (size_t)kvl_ceil_div(at->counts.num_updates, UPDATE_GROUP) * UPDATE_GROUP;
    return kvl_chain_kernel(chain, engine->update.handle, 1, &global, &local, false);
}

static kvleaf_status run_resolve(kvl_engine *engine, const kvl_schedule *at, const kvl_step *step, kvl_chain *chain)
{
    cl_int4 work = {{at->resolve_at, at->num_resolve, 0, 0}};
    cl_long first = step->device_lens_first;
    const kvl_arg args[] = {KVL_ARG_KEPT(engine->meta), KVL_ARG(step->device_lens), KVL_ARG_KEPT(first),
                            KVL_ARG_KEPT(work)};
    kvleaf_status status = kvl_kernel_update(engine->device, &engine->resolve, args, 4);
    if (status)
        return status;
    size_t global = (size_t)at->num_resolve;
    return kvl_chain_kernel(chain, engine->resolve.handle, 1, &global, NULL, false);
}

kvleaf_status kvl_engine_submit(kvl_engine *engine, const kvl_step *step, kvl_chain *chain)
{
    kvl_staging_slot *slot = engine->open;
    kvl_schedule at = engine->begun;
    engine->open = NULL;
    kvleaf_status status = kvl_schedule_build(engine, step, slot->host, &at);
    if (status)
        return status;
    kvl_fuse_note(engine, step, slot->host, &at);
    engine->now.ready = false;
    if (at.used > QUEUE_INTS)
        status =
            kvl_chain_write(chain, engine->meta, 0, (size_t)at.used * sizeof(int32_t), slot->host, &slot->uploaded);
    if (!status && at.counts.num_updates)
        status = run_updates(engine, &at, chain);
    if (!status && at.num_resolve)
        status = run_resolve(engine, &at, step, chain);
    if (!status)
        engine->now = at;
    return status;
}

cl_mem kvl_engine_meta(const kvl_engine *engine)
{
    return engine->meta;
}

int32_t kvl_engine_copies_at(const kvl_engine *engine)
{
    return engine->now.copies_at;
}

int32_t kvl_engine_total_q(const kvl_engine *engine)
{
    return engine->now.ready ? engine->now.total_q : 0;
}
