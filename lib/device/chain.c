/* SPDX-License-Identifier: Apache-2.0 */
#include "device/chain.h"

static kvleaf_status keeps_order(const kvleaf_device *device, cl_command_queue queue, bool *in_order)
{
    cl_command_queue_properties properties = 0;
    cl_int error = device->cl->GetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties, NULL);
    if (error)
        return kvl_fail_opencl("clGetCommandQueueInfo", error);
    *in_order = !(properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE);
    return KVLEAF_OK;
}

kvl_chain kvl_chain_in_order(kvleaf_device *device, const kvleaf_exec *exec)
{
    return (kvl_chain){.device = device,
                       .queue = exec->queue,
                       .in_order = true,
                       .num_wait = exec->num_wait,
                       .wait_list = exec->wait_list,
                       .event_out = exec->event_out};
}

kvleaf_status kvl_chain_begin(kvl_chain *chain, kvleaf_device *device, const kvleaf_exec *exec)
{
    *chain = kvl_chain_in_order(device, exec);
    return keeps_order(device, exec->queue, &chain->in_order);
}

/* What an enqueue call needs to give: an event for the next command to wait on, for the caller, or none. */
static cl_event *wanted(const kvl_chain *chain, bool last, cl_event *event)
{
    *event = NULL;
    return !chain->in_order || (last && chain->event_out) ? event : NULL;
}

/* Records a command that was enqueued with `event` (NULL = none made). */
static void advance(kvl_chain *chain, cl_event event, bool last)
{
    if (chain->last)
        chain->device->cl->ReleaseEvent(chain->last);
    chain->last = NULL;
    chain->num_wait = 0;
    chain->wait_list = NULL;
    if (!event)
        return;
    if (last && chain->event_out) {
        *chain->event_out = event;
        chain->gave_event = true;
        return;
    }
    chain->last = event;
    if (!chain->in_order) {
        chain->num_wait = 1;
        chain->wait_list = &chain->last;
    }
}

kvleaf_status kvl_chain_kernel(kvl_chain *chain, cl_kernel kernel, cl_uint dimensions, const size_t *global,
                               const size_t *local, bool last)
{
    cl_event event;
    cl_event *out = wanted(chain, last, &event);
    cl_int error = chain->device->cl->EnqueueNDRangeKernel(chain->queue, kernel, dimensions, NULL, global, local,
                                                           chain->num_wait, chain->wait_list, out);
    if (error)
        return kvl_fail_opencl("clEnqueueNDRangeKernel", error);
    advance(chain, event, last);
    return KVLEAF_OK;
}

kvleaf_status kvl_chain_write(kvl_chain *chain, cl_mem buffer, size_t offset, size_t size, const void *data,
                              cl_event *done)
{
    const kvleaf_opencl *cl = chain->device->cl;
    cl_event event;
    cl_event *out = wanted(chain, false, &event);
    cl_int error = cl->EnqueueWriteBuffer(chain->queue, buffer, CL_FALSE, offset, size, data, chain->num_wait,
                                          chain->wait_list, done ? &event : out);
    if (error)
        return kvl_fail_opencl("clEnqueueWriteBuffer", error);
    if (done && !chain->in_order) { /* two owners */
        error = cl->RetainEvent(event);
        if (error) { /* without a second reference nothing else keeps `data` from being changed under the write */
            cl->WaitForEvents(1, &event);
            cl->ReleaseEvent(event);
            return kvl_fail_opencl("clRetainEvent", error);
        }
    }
    if (done)
        *done = event;
    advance(chain, chain->in_order ? NULL : event, false);
    return KVLEAF_OK;
}

kvleaf_status kvl_chain_read(kvl_chain *chain, cl_mem buffer, size_t offset, size_t size, void *data, bool wait)
{
    cl_event event;
    cl_event *out = wanted(chain, false, &event);
    cl_int error = chain->device->cl->EnqueueReadBuffer(chain->queue, buffer, wait ? CL_TRUE : CL_FALSE, offset, size,
                                                        data, chain->num_wait, chain->wait_list, out);
    if (error)
        return kvl_fail_opencl("clEnqueueReadBuffer", error);
    advance(chain, event, false);
    return KVLEAF_OK;
}

kvleaf_status kvl_chain_write_now(kvl_chain *chain, cl_mem buffer, size_t offset, size_t size, const void *data)
{
    cl_event event;
    cl_event *out = wanted(chain, false, &event);
    cl_int error = chain->device->cl->EnqueueWriteBuffer(chain->queue, buffer, CL_TRUE, offset, size, data,
                                                         chain->num_wait, chain->wait_list, out);
    if (error)
        return kvl_fail_opencl("clEnqueueWriteBuffer", error);
    advance(chain, event, false);
    return KVLEAF_OK;
}

kvleaf_status kvl_chain_mark(kvl_chain *chain, cl_event *out)
{
    cl_int error = chain->device->cl->EnqueueMarkerWithWaitList(chain->queue, chain->num_wait, chain->wait_list, out);
    return error ? kvl_fail_opencl("clEnqueueMarkerWithWaitList", error) : KVLEAF_OK;
}

kvleaf_status kvl_chain_end(kvl_chain *chain, kvleaf_status status)
{
    const kvleaf_opencl *cl = chain->device->cl;
    if (!status && chain->event_out && !chain->gave_event) {
        cl_int error = cl->EnqueueMarkerWithWaitList(chain->queue, chain->num_wait, chain->wait_list, chain->event_out);
        if (error)
            status = kvl_fail_opencl("clEnqueueMarkerWithWaitList", error);
    }
    if (chain->last)
        cl->ReleaseEvent(chain->last);
    chain->last = NULL;
    return status;
}
