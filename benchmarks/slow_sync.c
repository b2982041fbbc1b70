/* Preloaded by --slow-sync: every sync takes at least so long, as on disks that many users have.
 *
 * The real sync is done first, so nothing is less durable than without it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct timespec begin(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now;
}

static void wait_since(struct timespec start)
{
    const char *text = getenv("WECLAW_BENCH_SLOW_SYNC_US");
    long us = text ? atol(text) : 0;
    int kept = errno;
    start.tv_sec += us / 1000000;
    start.tv_nsec += us % 1000000 * 1000;
    if (start.tv_nsec >= 1000000000) {
        start.tv_nsec -= 1000000000;
        start.tv_sec++;
    }
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &start, NULL) == EINTR)
        ;
    errno = kept;
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    struct timespec start = begin();
    int result = real(fd);
    wait_since(start);
    return result;
}

int fdatasync(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    struct timespec start = begin();
    int result = real(fd);
    wait_since(start);
    return result;
}

int msync(void *address, size_t length, int flags)
{
    static int (*real)(void *, size_t, int);
    if (!real)
        real = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync");
    struct timespec start = begin();
    int result = real(address, length, flags);
    if (flags & MS_SYNC)
        wait_since(start);
    return result;
}

static ssize_t write_flagged(const char *name, int fd, const struct iovec *parts, int count,
                             off64_t at, int flags)
{
    ssize_t (*real)(int, const struct iovec *, int, off64_t, int) =
        (ssize_t (*)(int, const struct iovec *, int, off64_t, int))dlsym(RTLD_NEXT, name);
    struct timespec start = begin();
    ssize_t result = real(fd, parts, count, at, flags);
    if (flags & (RWF_DSYNC | RWF_SYNC))
        wait_since(start);
    return result;
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags)
{
    return write_flagged("pwritev2", fd, parts, count, at, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
{
    return write_flagged("pwritev64v2", fd, parts, count, at, flags);
}
