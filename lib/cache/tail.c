/* SPDX-License-Identifier: Apache-2.0 */
#include "cache/tail.h"

kvleaf_status kvl_tail_create(kvl_tail *tail, kvleaf_device *device)
{
    *tail = (kvl_tail){.device = device, .mutex = kvl_mutex_create(&device->allocator)};
    return tail->mutex ? KVLEAF_OK : kvl_fail_memory(sizeof *tail);
}

void kvl_tail_destroy(kvl_tail *tail)
{
    if (tail->event)
        tail->device->cl->ReleaseEvent(tail->event);
    if (tail->queue)
        tail->device->cl->ReleaseCommandQueue(tail->queue);
    if (tail->mutex)
        kvl_mutex_destroy(&tail->device->allocator, tail->mutex);
    *tail = (kvl_tail){0};
}

static kvleaf_status failed(const kvl_tail *tail)
{
    return tail->failure ? kvl_fail_device("an earlier step", tail->failure) : KVLEAF_OK;
}

void kvl_tail_fail(kvl_tail *tail, cl_int failure)
{
    kvl_mutex_lock(tail->mutex);
    if (!tail->failure)
        tail->failure = failure;
    kvl_mutex_unlock(tail->mutex);
}

void kvl_tail_flush(kvl_tail *tail)
{
    kvl_mutex_lock(tail->mutex);
    if (tail->queue)
        tail->device->cl->Flush(tail->queue);
    kvl_mutex_unlock(tail->mutex);
}

kvleaf_status kvl_tail_check(kvl_tail *tail)
{
    kvl_mutex_lock(tail->mutex);
    kvleaf_status status = failed(tail);
    kvl_mutex_unlock(tail->mutex);
    return status;
}

static void replace_event(kvl_tail *tail, cl_event event)
{
    if (tail->event)
        tail->device->cl->ReleaseEvent(tail->event);
    tail->event = event;
}

/* Leaves the state in which one in-order queue orders everything: a marker stands for what is on that queue. */
static kvleaf_status start_events(kvl_tail *tail)
{
    if (tail->queue) {
        cl_event marker = NULL;
        cl_int error = tail->device->cl->EnqueueMarkerWithWaitList(tail->queue, 0, NULL, &marker);
        if (error)
            return kvl_fail_opencl("clEnqueueMarkerWithWaitList", error);
        replace_event(tail, marker);
    }
    tail->many = true;
    return KVLEAF_OK;
}

/* Makes the tail fit to be waited for on `queue`, and finds out whether it failed. */
static kvleaf_status ready_event(kvl_tail *tail, cl_command_queue queue)
{
    const kvleaf_opencl *cl = tail->device->cl;
    cl_int state = CL_COMPLETE;
    if (!tail->event)
        return KVLEAF_OK;
    cl_int error = cl->GetEventInfo(tail->event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state, &state, NULL);
    if (error)
        return kvl_fail_opencl("clGetEventInfo", error);
    if (state < 0) {
        tail->failure = state;
        return failed(tail);
    }
    /* Another queue may only wait for what was flushed to the device. */
    error = queue != tail->queue ? cl->Flush(tail->queue) : CL_SUCCESS;
    return error ? kvl_fail_opencl("clFlush", error) : KVLEAF_OK;
}

/* The tail and the caller's events in one list. */
static kvleaf_status join_waits(kvl_tail_call *call)
{
    kvl_tail *tail = call->tail;
    kvl_chain *chain = &call->chain;
    if (!tail->event)
        return KVLEAF_OK;
    cl_uint count = 0;
    call->waits[count++] = tail->event;
    if (chain->num_wait < KVL_TAIL_WAITS) {
        for (cl_uint i = 0; i < chain->num_wait; i++)
            call->waits[count++] = chain->wait_list[i];
    } else {
        cl_int error = tail->device->cl->EnqueueMarkerWithWaitList(call->queue, chain->num_wait, chain->wait_list,
                                                                   &call->gathered);
        if (error)
            return kvl_fail_opencl("clEnqueueMarkerWithWaitList", error);
        call->waits[count++] = call->gathered;
    }
    chain->num_wait = count;
    chain->wait_list = call->waits;
    return KVLEAF_OK;
}

/* The driver is not asked about the tail's own queue: it is retained, so it is still the one that was asked about, and
 * it keeps order, or there are events by now. */
static kvleaf_status start_chain(const kvl_tail *tail, const kvleaf_exec *exec, kvl_tail_call *call)
{
    kvleaf_status status = kvl_check_exec_fields(exec);
    const bool known = !status && exec->queue == tail->queue;
    if (!status && !known)
        status = kvl_check_queue(tail->device, exec->queue);
    if (!status)
        status = failed(tail);
    if (status)
        return status;
    if (known)
        call->chain = kvl_chain_in_order(tail->device, exec);
    else
        status = kvl_chain_begin(&call->chain, tail->device, exec);
    call->queue = exec->queue;
    call->event_out = exec->event_out;
    return status;
}

static kvleaf_status begin_locked(kvl_tail *tail, const kvleaf_exec *exec, kvl_tail_call *call)
{
    kvleaf_status status = start_chain(tail, exec, call);
    if (status)
        return status;
    bool other = tail->queue && tail->queue != exec->queue;
    if (!tail->many && (other || !call->chain.in_order))
        status = start_events(tail);
    call->many = tail->many;
    if (!status && call->many) {
        /* Every command makes an event, so that after a failure the tail covers exactly what was enqueued. */
        call->chain.in_order = false;
        call->chain.event_out = &call->own;
        status = ready_event(tail, exec->queue);
        if (!status)
            status = join_waits(call);
    }
    if (!status && tail->queue != exec->queue) {
        cl_int error = tail->device->cl->RetainCommandQueue(exec->queue);
        if (error)
            status = kvl_fail_opencl("clRetainCommandQueue", error);
    }
    return status;
}

static void release_gathered(kvl_tail_call *call)
{
    if (call->gathered)
        call->tail->device->cl->ReleaseEvent(call->gathered);
    call->gathered = NULL;
}

kvleaf_status kvl_tail_begin(kvl_tail *tail, const kvleaf_exec *exec, kvl_tail_call *call)
{
    call->tail = tail; /* the rest of it is set where the call goes on, the list of waits as far as it is used */
    call->own = call->gathered = NULL;
    kvl_mutex_lock(tail->mutex);
    kvleaf_status status = begin_locked(tail, exec, call);
    if (status) {
        release_gathered(call);
        kvl_mutex_unlock(tail->mutex);
    }
    return status;
}

static void replace_queue(kvl_tail *tail, cl_command_queue queue)
{
    if (tail->queue == queue)
        return;
    if (tail->queue)
        tail->device->cl->ReleaseCommandQueue(tail->queue);
    tail->queue = queue;
}

/* The last command that was enqueued becomes the tail, be it the last of the call or the one before a failure. */
static kvleaf_status end_with_event(kvl_tail_call *call, kvleaf_status status)
{
    kvl_tail *tail = call->tail;
    kvl_chain *chain = &call->chain;
    const kvleaf_opencl *cl = tail->device->cl;
    cl_event last = chain->last;
    if (last) { /* taken out of the chain, which would release it */
        call->waits[0] = last;
        chain->wait_list = call->waits;
        chain->last = NULL;
    }
    status = kvl_chain_end(chain, status);
    if (last && call->own) {
        cl->ReleaseEvent(last);
        last = NULL;
    }
    bool enqueued = call->own || last;
    if (enqueued)
        replace_event(tail, call->own ? call->own : last);
    if (enqueued || !tail->queue)
        replace_queue(tail, call->queue);
    else if (tail->queue != call->queue)
        cl->ReleaseCommandQueue(call->queue);
    if (status || !call->event_out)
        return status;
    cl_int error = cl->RetainEvent(call->own);
    if (error)
        return kvl_fail_opencl("clRetainEvent", error);
    *call->event_out = call->own;
    return KVLEAF_OK;
}

kvleaf_status kvl_tail_end(kvl_tail_call *call, kvleaf_status status)
{
    kvl_tail *tail = call->tail;
    if (call->many) {
        status = end_with_event(call, status);
    } else {
        status = kvl_chain_end(&call->chain, status);
        replace_queue(tail, call->queue);
    }
    release_gathered(call);
    kvl_mutex_unlock(tail->mutex);
    return status;
}
