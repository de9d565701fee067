/* User objects: reference counted things of the application that graphs keep alive. */
#include "cu_user.h"

#include <stdlib.h>

struct CUuserObject_st {
    void *pointer;
    CUhostFn destroy;
    unsigned count;
};

/* The application's destructor may not call CUDA, so that it may run under our lock. */
static void release(CUuserObject object, unsigned count)
{
    object->count -= count < object->count ? count : object->count;
    if (object->count)
        return;
    object->destroy(object->pointer);
    free(object);
}

static CUresult keep(CUgraph graph, CUuserObject object, unsigned count)
{
    cu_user_reference *reference = calloc(1, sizeof *reference);
    if (!reference)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *reference = (cu_user_reference){object, count, graph->users};
    graph->users = reference;
    return CUDA_SUCCESS;
}

CUresult cu_user_keep_all(CUgraph from, CUgraph to)
{
    for (const cu_user_reference *one = from->users; one; one = one->next) {
        const CUresult bad = keep(to, one->object, one->count);
        if (bad)
            return bad;
        one->object->count += one->count;
    }
    return CUDA_SUCCESS;
}

void cu_user_drop_all(CUgraph graph)
{
    for (cu_user_reference *one = graph->users, *next; one; one = next) {
        next = one->next;
        release(one->object, one->count);
        free(one);
    }
    graph->users = NULL;
}

CU_EXPORT CUresult cuUserObjectCreate(CUuserObject *object, void *pointer, CUhostFn destroy, unsigned int count,
                                      unsigned int flags)
{
    const CUresult bad = cu_initialised();
    if (bad || !object || !destroy || !count || flags != 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *object = calloc(1, sizeof **object);
    if (!*object)
        return CUDA_ERROR_OUT_OF_MEMORY;
    **object = (struct CUuserObject_st){pointer, destroy, count};
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuUserObjectRetain(CUuserObject object, unsigned int count)
{
    if (!object || !count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    object->count += count;
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
    if (!object || !count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    release(object, count);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)
{
    CUresult bad = cu_graph_of(graph);
    if (bad || !object || !count || flags > 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    bad = keep(graph, object, count);
    if (!bad && !(flags & 1)) /* 1: the caller's references move to the graph */
        object->count += count;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)
{
    const CUresult bad = cu_graph_of(graph);
    if (bad || !object || !count)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    for (cu_user_reference **link = &graph->users; *link && count; ) {
        cu_user_reference *one = *link;
        const unsigned drop = one->object != object ? 0 : one->count < count ? one->count : count;
        one->count -= drop;
        count -= drop;
        if (drop)
            release(object, drop);
        if (one->count == 0) {
            *link = one->next;
            free(one);
        } else {
            link = &one->next;
        }
    }
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}
