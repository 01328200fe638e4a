// Sets the clock of a process five seconds ahead, and two hours further once the file STEP_FILE exists.
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = (int)syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && clock == CLOCK_REALTIME)
        time->tv_sec += access(STEP_FILE, F_OK) == 0 ? 7205 : 5;
    return result;
}
