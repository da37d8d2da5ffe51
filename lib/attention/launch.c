/* SPDX-License-Identifier: Apache-2.0 */
/* The launches of a step, and merge. Every check precedes the first enqueue. */
#include "attention/state.h"

#include "common/decode_values.h"
#include "common/plan.h"

#include <stddef.h>

#define LOG2E 1.44269504088896340736f

static kvleaf_status need_step(const kvl_engine *engine)
{
    return engine->now.ready ? KVLEAF_OK : kvl_fail(KVLEAF_INVALID, "plan", 0, 0, "no step is planned");
}

static cl_int4 shape_of(const kvl_engine *engine)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    return (cl_int4){{geometry->num_heads, geometry->num_kv_heads, geometry->head_dim, geometry->block_size}};
}

/* The engine releases its buffers after its kernels. */
static kvl_arg table_arg(const kvl_engine *engine)
{
    const cl_mem *table = engine->now.table ? &engine->now.table : &engine->meta;
    return (kvl_arg){sizeof *table, table, table == &engine->meta};
}

/* NULL where there is no buffer, which no kernel looks at then, and where it is `before`, which the kernel knows: a
 * driver's enqueue takes its time for each. */
static kvl_arg buffer_arg(const cl_mem *memory, cl_mem before)
{
    static const cl_mem none = NULL;
    const bool there = *memory && *memory != before;
    return (kvl_arg){sizeof *memory, there ? memory : &none, !there};
}

/* The two arguments of a tensor. */
#define BOUND_ARGS(bound) buffer_arg(&(bound).memory, NULL), KVL_ARG_KEPT((bound).view)

static kvleaf_status launch(kvl_engine *engine, kvl_kernel *kernel, const kvl_arg *args, int count,
                            const size_t global[2], size_t work_group, kvl_chain *chain, bool last)
{
    kvleaf_status status = kvl_kernel_update(engine->device, kernel, args, count);
    const size_t local[2] = {work_group, 1};
    return status ? status : kvl_chain_kernel(chain, kernel->handle, 2, global, local, last);
}

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* Work-items of append and gather: a work-group a token and KV head, or, where a work-group takes several tokens, one
 * for every KV head and run of tokens, heads first. */
static void token_items(const kvl_chosen *chosen, int32_t tokens, int32_t heads, size_t global[2])
{
    int32_t each = chosen->variant->item_tokens;
    global[0] = (size_t)(each ? heads : tokens) * (size_t)chosen->work_group;
    global[1] = each ? (size_t)kvl_ceil_div(tokens, each) : (size_t)heads;
}

/* New keys and values as kernels take them. */
typedef struct append_call {
    kvl_bound k, v;
} append_call;

static kvleaf_status bind_append(const kvl_engine *engine, const kvl_fresh *fresh, append_call *call)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    const kvl_schedule *now = &engine->now;
    kvl_expect expect = {"k", now->total_q, geometry->num_kv_heads, geometry->head_dim, .beside = NULL};
    kvleaf_status status = kvl_bind_tensor(engine, fresh->k, &expect, &call->k);
    expect.name = "v";
    expect.beside = &call->k;
    if (!status)
        status = kvl_bind_tensor(engine, fresh->v, &expect, &call->v);
    if (status)
        return status;
    call->k.view.s[3] = fresh->k->dtype;
    call->v.view.s[3] = fresh->v->dtype;
    if (now->counts.num_slots != now->total_q)
        return kvl_fail(KVLEAF_INVALID, "slot_mapping", now->counts.num_slots, now->total_q,
                        "the step was planned with %d slots, append needs %d", now->counts.num_slots, now->total_q);
    return KVLEAF_OK;
}

static kvleaf_status run_append(kvl_engine *engine, const append_call *call, const kvl_view *view, kvl_chain *chain,
                                bool last)
{
    const kvl_schedule *now = &engine->now;
    cl_int4 shape = shape_of(engine), work = {{now->slots_at, now->total_q, now->num_blocks, 0}};
    const kvl_arg args[] = {BOUND_ARGS(call->k),        BOUND_ARGS(call->v), KVL_ARG(view->k),
                            KVL_ARG_KEPT(view->k_view), KVL_ARG(view->v),    KVL_ARG_KEPT(view->v_view),
                            KVL_ARG_KEPT(engine->meta), KVL_ARG_KEPT(shape), KVL_ARG_KEPT(work)};
    const kvl_chosen *chosen = &engine->chosen[KVL_APPEND];
    size_t global[2];
    token_items(chosen, now->total_q, engine->params.geometry.num_kv_heads, global);
    return launch(engine, &engine->append, args, COUNT(args), global, (size_t)chosen->work_group, chain, last);
}

kvleaf_status kvl_engine_append(kvl_engine *engine, const kvl_fresh *fresh, const kvl_view *view, kvl_chain *chain)
{
    append_call call;
    kvleaf_status status = need_step(engine);
    if (!status)
        status = bind_append(engine, fresh, &call);
    if (status || !engine->now.total_q)
        return status;
    return run_append(engine, &call, view, chain, true);
}

/* What attend checked and its launches share. */
typedef struct attend_call {
    kvl_bound q, out, lse;
    const kvl_view *view;
    cl_int4 shape;
    cl_float scale_log2;
    append_call fresh; /* for decode to append */
    cl_long2 slots;    /* where they lie in meta, -1 where decode is to append nothing; that of the first row */
} attend_call;

_Static_assert(sizeof(decode_values) == 320 && offsetof(decode_values, none) == 316,
               "no padding that C and OpenCL C may see differently");

static decode_values values_of(const kvl_engine *engine, const attend_call *call)
{
    const kvl_schedule *now = &engine->now;
    const int32_t *row = now->first_row;
    return (decode_values){
        .q_view = call->q.view,
        .out_view = call->out.view,
        .lse_view = call->lse.view,
        .k_view = call->view->k_view,
        .v_view = call->view->v_view,
        .k_source_view = call->fresh.k.view,
        .v_source_view = call->fresh.v.view,
        .slots = call->slots,
        .workspace = engine->workspace,
        .shape = call->shape,
        .work = {{now->rows_at, now->splits_at, now->num_splits, now->num_blocks}},
        .first_row = {{row[ROW_Q_TOKEN], row[ROW_VISIBLE], row[ROW_TABLE], row[ROW_FIRST]}},
        .runs = {{row[ROW_RUN], now->num_rows}},
        .scale_log2 = call->scale_log2,
    };
}

/* Work-groups for a queue of tasks: one a compute unit, fewer where tasks of one length give no one a longer turn. */
static size_t queue_groups(const kvl_engine *engine, size_t tasks, bool even)
{
    size_t units = engine->units, turns = (tasks + units - 1) / units;
    if (!even)
        return tasks < units ? tasks : units;
    return (tasks + turns - 1) / turns;
}

static kvleaf_status launch_decode(kvl_engine *engine, const attend_call *call, const size_t global[2],
                                   kvl_chain *chain, bool last)
{
    const decode_values values = values_of(engine, call);
    const cl_mem q = call->q.memory;
    const kvl_arg args[] = {KVL_ARG(values),
                            KVL_ARG(q),
                            KVL_ARG(call->view->k),
                            buffer_arg(&call->view->v, call->view->k),
                            table_arg(engine),
                            KVL_ARG_KEPT(engine->meta),
                            buffer_arg(&call->fresh.k.memory, q),
                            buffer_arg(&call->fresh.v.memory, q),
                            buffer_arg(&call->out.memory, q),
                            buffer_arg(&call->lse.memory, NULL)};
    int count = COUNT(args) - (kvl_folds_itself(engine) ? 0 : 2); /* the last two are of kernels that fold */
    size_t group = (size_t)engine->chosen[KVL_DECODE].work_group;
    return launch(engine, &engine->decode, args, count, global, group, chain, last);
}

/* Decode in one launch by a kernel that folds its splits itself. */
static kvleaf_status run_folding_decode(kvl_engine *engine, const attend_call *call, kvl_chain *chain, bool last)
{
    const kvl_schedule *now = &engine->now;
    const kvl_chosen *chosen = &engine->chosen[KVL_DECODE];
    size_t tasks = (size_t)now->num_splits * (size_t)engine->params.geometry.num_kv_heads;
    size_t groups = chosen->variant->unit_groups ? tasks : queue_groups(engine, tasks, now->even_runs);
    const size_t global[2] = {groups * (size_t)chosen->work_group, 1};
    return launch_decode(engine, call, global, chain, last);
}

static kvleaf_status run_decode(kvl_engine *engine, const attend_call *call, kvl_chain *chain, bool last)
{
    const kvl_schedule *now = &engine->now;
    const kvl_chosen *chosen = &engine->chosen[KVL_DECODE];
    if (kvl_folds_itself(engine))
        return run_folding_decode(engine, call, chain, last);
    size_t group = (size_t)chosen->work_group;
    size_t global[2] = {(size_t)now->num_splits * group, (size_t)engine->params.geometry.num_kv_heads};
    if (chosen->variant->persistent)
        global[0] = engine->units, global[1] = 1;
    kvleaf_status status = launch_decode(engine, call, global, chain, false);
    if (status)
        return status;
    cl_long2 fold_work = {{now->rows_at, engine->workspace.s[1]}};
    const kvl_arg fold_args[] = {KVL_ARG_KEPT(engine->meta), BOUND_ARGS(call->out), BOUND_ARGS(call->lse),
                                 KVL_ARG_KEPT(call->shape), KVL_ARG_KEPT(fold_work)};
    const size_t fold_global[2] = {(size_t)now->num_rows * (size_t)engine->params.geometry.num_heads * group, 1};
    return launch(engine, &engine->fold, fold_args, COUNT(fold_args), fold_global, group, chain, last);
}

static kvleaf_status run_prefill(kvl_engine *engine, const attend_call *call, kvl_chain *chain)
{
    const kvl_schedule *now = &engine->now;
    const kvl_chosen *chosen = &engine->chosen[KVL_PREFILL];
    size_t group = (size_t)chosen->work_group;
    cl_int4 work = {{now->entries_at, now->items_at, now->num_items, now->num_blocks}};
    cl_int4 work2 = {{now->claims_at, now->num_claims, engine->tile_heads, 0}};
    const kvl_arg args[] = {BOUND_ARGS(call->q),
                            KVL_ARG(call->view->k),
                            KVL_ARG_KEPT(call->view->k_view),
                            KVL_ARG(call->view->v),
                            KVL_ARG_KEPT(call->view->v_view),
                            table_arg(engine),
                            KVL_ARG_KEPT(engine->meta),
                            BOUND_ARGS(call->out),
                            BOUND_ARGS(call->lse),
                            KVL_ARG_KEPT(call->shape),
                            KVL_ARG_KEPT(work),
                            KVL_ARG_KEPT(call->scale_log2),
                            KVL_ARG_KEPT(work2)};
    size_t items = (size_t)now->num_items, units = engine->units;
    bool from_queue = chosen->variant->persistent || (chosen->variant->queued && items > units);
    const size_t global[2] = {(from_queue ? units : items) * group, 1};
    return launch(engine, &engine->prefill, args, COUNT(args), global, group, chain, true);
}

/* LSE as a kernel takes it: view.s3 says whether to write. */
static kvleaf_status bind_lse(const kvl_engine *engine, const kvleaf_tensor *lse, int32_t rows, kvl_bound *out)
{
    *out = (kvl_bound){.memory = NULL};
    if (!lse)
        return KVLEAF_OK;
    kvl_expect expect = {"lse", rows, engine->params.geometry.num_heads, 1, .output = true};
    kvleaf_status status = kvl_check_dtype("lse", lse->dtype, KVLEAF_F32);
    if (!status)
        status = kvl_bind_tensor(engine, lse, &expect, out);
    out->view.s[3] = 1;
    return status;
}

/* `beside`: bound before in this call, or NULL. */
static kvleaf_status bind_attend(const kvl_engine *engine, const kvleaf_tensor *q, const kvleaf_tensor *out,
                                 const kvleaf_tensor *lse, const kvl_bound *beside, attend_call *call)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    kvl_expect expect = {"q", engine->now.total_q, geometry->num_heads, geometry->head_dim, .beside = beside};
    kvleaf_status status = kvl_bind_tensor(engine, q, &expect, &call->q);
    if (!status)
        status = kvl_check_dtype("q", q->dtype, geometry->q_dtype);
    expect.name = "out";
    expect.output = true;
    expect.beside = &call->q;
    if (!status)
        status = kvl_bind_tensor(engine, out, &expect, &call->out);
    if (!status)
        status = kvl_check_dtype("out", out->dtype, geometry->out_dtype);
    if (!status)
        status = bind_lse(engine, lse, engine->now.total_q, &call->lse);
    return status;
}

/* A call that appends nothing. */
static attend_call make_attend(const kvl_engine *engine, const kvl_view *view, float softmax_scale)
{
    return (attend_call){
        .view = view, .shape = shape_of(engine), .scale_log2 = softmax_scale * LOG2E, .slots = {{-1, -1}}};
}

static kvleaf_status run_attend(kvl_engine *engine, const attend_call *call, kvl_chain *chain)
{
    kvleaf_status status = KVLEAF_OK;
    bool prefill = engine->now.num_items > 0;
    if (engine->now.num_rows)
        status = run_decode(engine, call, chain, !prefill);
    if (!status && prefill)
        status = run_prefill(engine, call, chain);
    return status;
}

kvleaf_status kvl_engine_attend(kvl_engine *engine, const kvleaf_tensor *q, const kvl_view *view,
                                const kvleaf_tensor *out, const kvleaf_tensor *lse, float softmax_scale,
                                kvl_chain *chain)
{
    attend_call call = make_attend(engine, view, softmax_scale);
    kvleaf_status status = need_step(engine);
    if (!status)
        status = bind_attend(engine, q, out, lse, NULL, &call);
    return status ? status : run_attend(engine, &call, chain);
}

kvleaf_status kvl_engine_append_attend(kvl_engine *engine, const kvl_fresh *fresh, const kvleaf_tensor *q,
                                       const kvl_view *view, const kvleaf_tensor *out, const kvleaf_tensor *lse,
                                       float softmax_scale, kvl_chain *chain)
{
    attend_call call = make_attend(engine, view, softmax_scale);
    append_call append;
    kvleaf_status status = need_step(engine);
    if (!status)
        status = bind_append(engine, fresh, &append);
    if (!status)
        status = bind_attend(engine, q, out, lse, &append.k, &call);
    if (status || !engine->now.total_q)
        return status;
    if (kvl_fuse_now(engine)) {
        call.fresh = append;
        call.slots = (cl_long2){{engine->now.slots_at, engine->now.first_slot}};
    } else {
        status = run_append(engine, &append, view, chain, false);
    }
    return status ? status : run_attend(engine, &call, chain);
}

kvleaf_status kvl_engine_gather(kvl_engine *engine, const kvl_view *view, const kvleaf_tensor *k,
                                const kvleaf_tensor *v, kvl_chain *chain)
{
    kvleaf_status status = need_step(engine);
    if (status)
        return status;
    const kvl_geometry *geometry = &engine->params.geometry;
    const kvl_schedule *now = &engine->now;
    kvl_expect expect = {"k", now->total_k, geometry->num_kv_heads, geometry->head_dim, .output = true};
    kvl_bound bound_k, bound_v;
    status = kvl_bind_tensor(engine, k, &expect, &bound_k);
    if (!status)
        status = kvl_check_dtype("k", k->dtype, geometry->kv_dtype);
    expect.name = "v";
    if (!status)
        status = kvl_bind_tensor(engine, v, &expect, &bound_v);
    if (!status)
        status = kvl_check_dtype("v", v->dtype, geometry->kv_dtype);
    if (status || !now->total_k)
        return status;
    cl_int4 shape = shape_of(engine), work = {{now->gather_at, now->num_seqs, now->num_blocks, now->total_k}};
    const kvl_arg args[] = {KVL_ARG(view->k),           KVL_ARG_KEPT(view->k_view), KVL_ARG(view->v),
                            KVL_ARG_KEPT(view->v_view), table_arg(engine),          KVL_ARG_KEPT(engine->meta),
                            BOUND_ARGS(bound_k),        BOUND_ARGS(bound_v),        KVL_ARG_KEPT(shape),
                            KVL_ARG_KEPT(work)};
    const kvl_chosen *chosen = &engine->chosen[KVL_GATHER];
    size_t global[2];
    token_items(chosen, now->total_k, geometry->num_kv_heads, global);
    return launch(engine, &engine->gather, args, COUNT(args), global, (size_t)chosen->work_group, chain, true);
}

/* n stacked partials as one tensor of n x rows tokens; checks that they lie inside the buffer. */
static kvleaf_status bind_parts(const kvl_engine *engine, const kvl_merge *merge, const kvleaf_tensor *tensor,
                                const char *name, int64_t dim, int64_t stride, kvl_bound *out)
{
    int64_t heads = engine->params.geometry.num_heads;
    if (!tensor)
        return kvl_fail_null(name);
    if (stride < 0 || stride > INT64_MAX / merge->n / 4)
        return kvl_fail(KVLEAF_INVALID, name, stride, 0, "%s's part stride %lld is out of range", name,
                        (long long)stride);
    kvleaf_tensor last = *tensor;
    last.offset += (uint64_t)(merge->n - 1) * (uint64_t)stride * sizeof(float);
    kvl_expect expect = {name, merge->rows, heads, dim, .output = false};
    kvleaf_status status = kvl_check_dtype(name, tensor->dtype, KVLEAF_F32);
    if (!status)
        status = kvl_bind_tensor(engine, &last, &expect, out);
    if (!status)
        status = kvl_bind_tensor(engine, tensor, &expect, out);
    if (!status)
        out->view = (cl_long4){{out->view.s[0], stride, out->view.s[1], out->view.s[2]}};
    return status;
}

kvleaf_status kvl_engine_merge(kvl_engine *engine, const kvl_merge *merge, kvl_chain *chain)
{
    const kvl_geometry *geometry = &engine->params.geometry;
    if (merge->n < 1)
        return kvl_fail_range("n", merge->n, 1, INT32_MAX);
    if (merge->rows < 0)
        return kvl_fail_range("rows", merge->rows, 0, INT32_MAX);
    kvl_bound outs = {.memory = NULL}, lses = outs, out = outs, lse = outs;
    kvleaf_status status =
        bind_parts(engine, merge, merge->outs, "outs", geometry->head_dim, merge->out_part_stride, &outs);
    if (!status)
        status = bind_parts(engine, merge, merge->lses, "lses", 1, merge->lse_part_stride, &lses);
    kvl_expect expect = {"out", merge->rows, geometry->num_heads, geometry->head_dim, .output = true};
    if (!status)
        status = kvl_bind_tensor(engine, merge->out, &expect, &out);
    if (!status)
        status = kvl_check_dtype("out", merge->out->dtype, geometry->out_dtype);
    if (!status)
        status = bind_lse(engine, merge->lse, merge->rows, &lse);
    if (status || !merge->rows)
        return status;
    cl_int4 shape = shape_of(engine), work = {{merge->n, merge->rows, 0, 0}};
    const kvl_arg args[] = {BOUND_ARGS(outs), BOUND_ARGS(lses),    BOUND_ARGS(out),
                            BOUND_ARGS(lse),  KVL_ARG_KEPT(shape), KVL_ARG_KEPT(work)};
    size_t group = (size_t)engine->chosen[KVL_MERGE].work_group;
    const size_t global[2] = {(size_t)merge->rows * (size_t)geometry->num_heads * group, 1};
    return launch(engine, &engine->merge, args, COUNT(args), global, group, chain, true);
}
