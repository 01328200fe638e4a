/*
 * bulkhead.h - run a C library as a worker of bulkhead-supervisor.
 *
 * A library exports `bulkhead_handle` (or the function named by `entry` in
 * workers.toml), the version marker BULKHEAD_LIBRARY, and optionally
 * `bulkhead_init`. The host process loads the library and calls
 * `bulkhead_init` once. Then the host calls `bulkhead_handle` for each job,
 * from up to `max_in_flight` threads at once. With `max_in_flight = 1`, all
 * calls come from the same thread.
 *
 *     #include <bulkhead.h>
 *     BULKHEAD_LIBRARY
 *     int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
 *     {
 *         host->result(job, job->payload, job->payload_len);
 *         return 0;
 *     }
 *
 *     cc -shared -fPIC -o libecho.so echo.c
 *
 * A crash, a hang or a leak in the library affects only this worker process
 * and the jobs in it.
 *
 * The stacks of these threads have the size of `rlimits.stack`, but from 2 MiB
 * to 64 MiB. In C++, declare the functions `noexcept`. The worker then ends
 * with the message of an uncaught exception. Declare a function named by
 * `entry` also `extern "C"`, and with BULKHEAD_EXPORT if the library is
 * compiled with -fvisibility=hidden.
 *
 * A process that the library forks is not the worker. A forked process must
 * terminate with _exit(), even if exec() fails. If it returns from the handler,
 * the host terminates it with status 1. The library must close only descriptors
 * that it has opened, because a worker that loses its link exits, immediately
 * or at the next heartbeat.
 */
#ifndef BULKHEAD_H
#define BULKHEAD_H

#include <stddef.h>
#include <stdint.h>

/* Exports a function or variable even if the library is compiled with
 * -fvisibility=hidden. */
#if defined(__GNUC__)
#define BULKHEAD_EXPORT __attribute__((visibility("default")))
#else
#define BULKHEAD_EXPORT
#endif

/* `extern "C"` and `noexcept` in C++. */
#if !defined(__cplusplus)
#define BULKHEAD_EXTERN extern
#define BULKHEAD_NOEXCEPT
#elif __cplusplus >= 201103L
#define BULKHEAD_EXTERN extern "C"
#define BULKHEAD_NOEXCEPT noexcept
#else
#define BULKHEAD_EXTERN extern "C"
#define BULKHEAD_NOEXCEPT throw()
#endif

/* The ABI version of this header. The host rejects a library with an unknown
 * version before it calls any function in the library. */
#define BULKHEAD_ABI_VERSION 1u

/* Defines the version marker of the library. Use this macro at file scope,
 * exactly once. */
#define BULKHEAD_LIBRARY \
    BULKHEAD_EXTERN BULKHEAD_EXPORT const uint32_t bulkhead_abi_version; \
    const uint32_t bulkhead_abi_version = BULKHEAD_ABI_VERSION;

#ifdef __cplusplus
extern "C" {
#endif

/* A job. All pointers are valid until the handler returns. */
typedef struct bulkhead_job {
    uint32_t struct_size;      /* sizeof(bulkhead_job) as the host knows it */
    uint32_t reserved;
    uint64_t number;           /* job number, as in outcomes, logs and events, which print it with "%" PRIx64 */
    const char *operation;     /* never NULL; "" if the client set no operation */
    const char *tenant;        /* never NULL; "" if the client set no tenant */
    const uint8_t *payload;    /* never NULL, even if payload_len is 0 */
    size_t payload_len;        /* bytes */
    void *host_data;           /* internal to the host; do not touch */
} bulkhead_job;

/* Flags of bulkhead_host.error; combine them with |. */
#define BULKHEAD_RETRYABLE    1u  /* the same job can succeed later */
#define BULKHEAD_CALLER_FAULT 2u  /* the payload is at fault, not the library */

/* Functions of the host that handlers can call. */
typedef struct bulkhead_host {
    uint32_t struct_size;      /* sizeof(bulkhead_host) as the host knows it */
    uint32_t abi_version;

    /* Copies `len` bytes from `data` to the end of the result. Can be called
     * repeatedly. Returns 0. If the result would exceed `max_result`, returns
     * -1, and the job ends as `failed` / `result_too_large`. If `data` is NULL
     * although `len` is not 0, returns -1, and the job ends as `failed` /
     * `library`. */
    int (*result)(const bulkhead_job *job, const void *data, size_t len);

    /* Sets the error of the job, before the handler returns non-zero. `code`
     * is a short, machine-readable word ("bad_header"), and `message` is a
     * human-readable sentence. Both are copied; NULL means "". If the handler
     * does not call this function, the code is "error_N", where N is the
     * handler's return value. */
    void (*error)(const bulkhead_job *job, const char *code, const char *message, uint32_t flags);

    /* Returns non-zero if the job was cancelled or its deadline has passed. A
     * handler that checks this regularly and returns early prevents the
     * supervisor from killing the worker. */
    int (*is_cancelled)(const bulkhead_job *job);

    /* Returns the number of milliseconds until the deadline, or 0 if the
     * deadline has passed. */
    uint64_t (*remaining_ms)(const bulkhead_job *job);

    /* Reports progress to the client: a fraction from 0.0 to 1.0, and a short
     * text or NULL. */
    void (*progress)(const bulkhead_job *job, double fraction, const char *text);
} bulkhead_host;

/* Handles a job. If the return value is 0, the job ends as `ok` with the bytes
 * passed to host->result. Otherwise the job ends as `failed` with the error set
 * by host->error. */
BULKHEAD_EXPORT int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) BULKHEAD_NOEXCEPT;

/* Optional. Runs once before the first job, within the `start.ready` time limit.
 * Returns 0 if the library is ready. For any other value, the worker does not
 * start, and operators see the text in `message` (at most `size` bytes,
 * including the final NUL). */
BULKHEAD_EXPORT int bulkhead_init(char *message, size_t size) BULKHEAD_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif
