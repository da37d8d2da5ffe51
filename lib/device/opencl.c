/* SPDX-License-Identifier: Apache-2.0 */
/* The entry points of the ICD loader, one table for the whole process. */
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include "device/device.h"

const kvleaf_opencl *kvleaf_opencl_loader(void)
{
    static const kvleaf_opencl loader = {
        .GetPlatformIDs = clGetPlatformIDs,
        .GetPlatformInfo = clGetPlatformInfo,
        .GetDeviceIDs = clGetDeviceIDs,
        .GetDeviceInfo = clGetDeviceInfo,
        .CreateContext = clCreateContext,
        .RetainContext = clRetainContext,
        .ReleaseContext = clReleaseContext,
        .GetContextInfo = clGetContextInfo,
        .CreateCommandQueue = clCreateCommandQueue,
        .RetainCommandQueue = clRetainCommandQueue,
        .ReleaseCommandQueue = clReleaseCommandQueue,
        .GetCommandQueueInfo = clGetCommandQueueInfo,
        .CreateBuffer = clCreateBuffer,
        .RetainMemObject = clRetainMemObject,
        .ReleaseMemObject = clReleaseMemObject,
        .GetMemObjectInfo = clGetMemObjectInfo,
        .CreateProgramWithSource = clCreateProgramWithSource,
        .CreateProgramWithBinary = clCreateProgramWithBinary,
        .BuildProgram = clBuildProgram,
        .GetProgramInfo = clGetProgramInfo,
        .GetProgramBuildInfo = clGetProgramBuildInfo,
        .ReleaseProgram = clReleaseProgram,
        .CreateKernel = clCreateKernel,
        .ReleaseKernel = clReleaseKernel,
        .SetKernelArg = clSetKernelArg,
        .GetKernelWorkGroupInfo = clGetKernelWorkGroupInfo,
        .EnqueueNDRangeKernel = clEnqueueNDRangeKernel,
        .EnqueueReadBuffer = clEnqueueReadBuffer,
        .EnqueueWriteBuffer = clEnqueueWriteBuffer,
        .EnqueueFillBuffer = clEnqueueFillBuffer,
        .EnqueueMarkerWithWaitList = clEnqueueMarkerWithWaitList,
        .RetainEvent = clRetainEvent,
        .ReleaseEvent = clReleaseEvent,
        .GetEventInfo = clGetEventInfo,
        .WaitForEvents = clWaitForEvents,
        .Flush = clFlush,
        .Finish = clFinish,
    };
    return &loader;
}
