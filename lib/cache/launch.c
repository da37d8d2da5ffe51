/* SPDX-License-Identifier: Apache-2.0 */
/* What an open step enqueues for a layer. Reads the plan and the tail only, so that it may run beside other calls on
 * the cache. */
#include "cache/cache.h"

static kvleaf_status check_call(const kvleaf_plan *plan, int32_t layer)
{
    if (!plan)
        return kvl_fail_null("plan");
    if (plan->state == KVL_PLAN_IDLE)
        return kvl_fail(KVLEAF_INVALID, "plan", 0, 0, "the plan has no open step");
    if (plan->state == KVL_PLAN_FAILED)
        return kvl_fail(KVLEAF_INVALID, "plan", 0, 0,
                        "an append or attend of the step failed: it can only be rolled back");
    if (layer < 0 || layer >= plan->cache->num_layers)
        return kvl_fail_range("layer", layer, 0, plan->cache->num_layers - 1);
    return KVLEAF_OK;
}

/* A step without the keys of a layer, or with doubtful ones, must not be committed. */
static kvleaf_status fail_step(kvleaf_plan *plan, kvleaf_status status)
{
    if (status && plan && plan->state == KVL_PLAN_OPEN)
        plan->state = KVL_PLAN_FAILED;
    return status;
}

/* A call on a layer: what it runs on, and its place in the order of the cache's commands. */
typedef struct layer_call {
    const kvl_cache_layer *layer;
    kvl_engine *engine;
    const kvl_view *view;
    kvl_tail_call tail;
} layer_call;

static kvleaf_status begin_call(kvleaf_plan *plan, int32_t layer, bool writes, const kvleaf_exec *exec, layer_call *out)
{
    kvleaf_status status = check_call(plan, layer);
    out->layer = NULL; /* the tail's part, which is large, is set by its own */
    out->engine = NULL;
    out->view = NULL;
    if (status)
        return status;
    const kvl_cache_layer *at = &plan->cache->layers[layer];
    if (writes && !at->owns)
        return kvl_fail(KVLEAF_INVALID, "layer", layer, at->pool_layer,
                        "layer %d has no keys and values of its own, it reads those of an earlier one", layer);
    const kvl_plan_group *part = &plan->groups[at->group];
    out->layer = at;
    out->engine = part->engine;
    out->view = &part->views[at->pool_layer];
    return kvl_tail_begin(&plan->cache->tail, exec, &out->tail);
}

static kvleaf_status append(kvleaf_plan *plan, int32_t layer, const kvl_fresh *fresh, const kvleaf_exec *exec)
{
    layer_call call;
    kvleaf_status status = begin_call(plan, layer, true, exec, &call);
    if (status)
        return status;
    status = kvl_engine_append(call.engine, fresh, call.view, &call.tail.chain);
    return kvl_tail_end(&call.tail, status);
}

kvleaf_status kvleaf_append(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *k, const kvleaf_tensor *v,
                            const kvleaf_exec *exec)
{
    const kvl_fresh fresh = {k, v};
    return fail_step(plan, append(plan, layer, &fresh, exec));
}

static kvleaf_status attend(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *q, const kvleaf_tensor *out,
                            const kvleaf_tensor *lse, const kvleaf_exec *exec)
{
    layer_call call;
    kvleaf_status status = begin_call(plan, layer, false, exec, &call);
    if (status)
        return status;
    status = kvl_engine_attend(call.engine, q, call.view, out, lse, call.layer->softmax_scale, &call.tail.chain);
    return kvl_tail_end(&call.tail, status);
}

kvleaf_status kvleaf_attend(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *q, const kvleaf_tensor *out,
                            const kvleaf_tensor *lse, const kvleaf_exec *exec)
{
    return fail_step(plan, attend(plan, layer, q, out, lse, exec));
}

static kvleaf_status append_attend(kvleaf_plan *plan, int32_t layer, const kvl_fresh *fresh, const kvleaf_tensor *q,
                                   const kvleaf_tensor *out, const kvleaf_tensor *lse, const kvleaf_exec *exec)
{
    layer_call call;
    kvleaf_status status = begin_call(plan, layer, true, exec, &call);
    if (status)
        return status;
    status = kvl_engine_append_attend(call.engine, fresh, q, call.view, out, lse, call.layer->softmax_scale,
                                      &call.tail.chain);
    return kvl_tail_end(&call.tail, status);
}

kvleaf_status kvleaf_append_attend(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *k, const kvleaf_tensor *v,
                                   const kvleaf_tensor *q, const kvleaf_tensor *out, const kvleaf_tensor *lse,
                                   const kvleaf_exec *exec)
{
    const kvl_fresh fresh = {k, v};
    return fail_step(plan, append_attend(plan, layer, &fresh, q, out, lse, exec));
}

kvleaf_status kvleaf_gather(kvleaf_plan *plan, int32_t layer, const kvleaf_tensor *k, const kvleaf_tensor *v,
                            const kvleaf_exec *exec)
{
    kvleaf_status status = check_call(plan, layer);
    if (status)
        return status;
    const kvl_cache_layer *at = &plan->cache->layers[layer];
    const kvl_plan_group *part = &plan->groups[at->group];
    if (part->gone)
        return kvl_fail(KVLEAF_INVALID, "layer", layer, plan->cache->groups[at->group].geometry.window,
                        "keys of layer %d have left its window of %d tokens", layer,
                        plan->cache->groups[at->group].geometry.window);
    kvl_tail_call call;
    status = kvl_tail_begin(&plan->cache->tail, exec, &call);
    if (status)
        return status;
    status = kvl_engine_gather(part->engine, &part->views[at->pool_layer], k, v, &call.chain);
    return kvl_tail_end(&call, status);
}
