/* GPU memory for torch's CUDAPluggableAllocator. Freed memory goes to the next allocation of its size, whatever a stream
 * still does with it: the allocator knows no record_stream, as one of a user's own may not.
 *
 *     cc -shared -fPIC -DCUDART='"libcudart.so.13"' reusing_allocator.c -o reusing_allocator.so -ldl -lpthread
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>

enum { MOST = 65536, GRAIN = 1 << 20 };

static struct { size_t size; void *memory; } freed[MOST];
static int count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A tensor a little smaller than a freed one takes its place. */
static size_t rounded(ssize_t size) {
    size_t grain = size < GRAIN ? 512 : GRAIN;
    return ((size_t)size + grain - 1) / grain * grain;
}

void *reusing_malloc(ssize_t size, int device, void *stream) {
    static int (*cuda_malloc)(void **, size_t);
    size_t wanted = rounded(size);
    void *memory = NULL;
    (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    for (int i = count - 1; i >= 0 && memory == NULL; i--)
        if (freed[i].size == wanted) {
            memory = freed[i].memory;
            freed[i] = freed[--count];
        }
    if (memory == NULL) {
        if (cuda_malloc == NULL)
            cuda_malloc = (int (*)(void **, size_t))dlsym(dlopen(CUDART, RTLD_NOW), "cudaMalloc");
        if (cuda_malloc(&memory, wanted) != 0)
            memory = NULL;
    }
    pthread_mutex_unlock(&lock);
    return memory;
}

void reusing_free(void *memory, ssize_t size, int device, void *stream) {
    (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    if (memory != NULL && count < MOST) {
        freed[count].size = rounded(size);
        freed[count++].memory = memory;
    }
    pthread_mutex_unlock(&lock);
}
