/* Counts the heap of a process, to be preloaded: live bytes and their most since the last mark.
 *
 * Every allocation goes to glibc's own functions; what it really takes (malloc_usable_size) is
 * added when it is made and taken off when it is freed. Made and used by memory.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

static atomic_long live, most;

static void *count(void *block) {
    if (block) {
        long now = atomic_fetch_add(&live, (long)malloc_usable_size(block)) +
                   (long)malloc_usable_size(block);
        long seen = atomic_load(&most);
        while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {
        }
    }
    return block;
}

static void forget(void *block) {
    if (block) atomic_fetch_sub(&live, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return count(__libc_malloc(size)); }

void *calloc(size_t number, size_t size) { return count(__libc_calloc(number, size)); }

void *realloc(void *old, size_t size) {
    forget(old);
    void *block = __libc_realloc(old, size);
    if (!block && size) count(old); /* the old one stays */
    return count(block);
}

void *memalign(size_t alignment, size_t size) { return count(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **where, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *where = block;
    return 0;
}

void free(void *block) {
    forget(block);
    __libc_free(block);
}

/* Start to look for the most from what is live now. */
void allocations_mark(void) {
    atomic_store(&live, 0);
    atomic_store(&most, 0);
}

/* The most bytes live at once since the mark, above those live then. */
long allocations_most(void) { return atomic_load(&most); }
