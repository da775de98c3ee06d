// Loaded before a program (LD_PRELOAD), counts the bytes it holds from malloc and its kin, whoever asks: Python, torch,
// C++'s new. Resident memory cannot tell: it grows by what the allocator keeps for later.
#include <errno.h>
#include <malloc.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static long held, most;

static void *took(void *memory) {
    if (!memory) return NULL;
    const long now = __atomic_add_fetch(&held, (long)malloc_usable_size(memory), __ATOMIC_RELAXED);
    long before = most;
    while (now > before && !__atomic_compare_exchange_n(&most, &before, now, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return memory;
}

static void gave(void *memory) {
    if (memory) __atomic_sub_fetch(&held, (long)malloc_usable_size(memory), __ATOMIC_RELAXED);
}

void *malloc(size_t size) { return took(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return took(__libc_calloc(count, size)); }
void *memalign(size_t line, size_t size) { return took(__libc_memalign(line, size)); }
void *aligned_alloc(size_t line, size_t size) { return took(__libc_memalign(line, size)); }
int posix_memalign(void **out, size_t line, size_t size) { return (*out = took(__libc_memalign(line, size))) ? 0 : ENOMEM; }
void *realloc(void *memory, size_t size) {
    gave(memory);
    return took(__libc_realloc(memory, size));
}
void free(void *memory) {
    gave(memory);
    __libc_free(memory);
}

// Bytes held now; the peak starts from them again.
long count_memory_start(void) { return most = held; }
long count_memory_peak(void) { return most; }
