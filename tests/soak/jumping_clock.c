/* SPDX-License-Identifier: Apache-2.0
 *
 * A library to preload. It adds seconds to the time of day, as if the machine's clock were set. The
 * first eight bytes of the file KVCORE_SOAK_CLOCK are the number of seconds; each call reads them
 * again. Monotonic clocks do not change.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t zero = 0;
static const volatile int64_t* ahead = &zero;
static int (*real_clock)(clockid_t, struct timespec*);

__attribute__((constructor)) static void open_clock(void) {
    real_clock = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
    const char* path = getenv("KVCORE_SOAK_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void* shared = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (shared != MAP_FAILED) ahead = shared;
}

int clock_gettime(clockid_t clock, struct timespec* now) {
    if (real_clock == NULL) open_clock(); /* called by the constructor of another library */
    int error = real_clock(clock, now);
    if (error == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return error;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
    (void)zone;
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found) != 0) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t* to) {
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found) != 0) return -1;
    if (to != NULL) *to = found.tv_sec;
    return found.tv_sec;
}
