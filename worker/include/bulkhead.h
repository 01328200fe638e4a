/*
 * bulkhead.h - put a C library behind a bulkhead-supervisor.
 *
 * A library exports `bulkhead_handle` (or the name given as `entry` in
 * workers.toml), the version marker BULKHEAD_LIBRARY, and, if it has something
 * to prepare, `bulkhead_init`. The host process loads it, calls `bulkhead_init`
 * once, and then `bulkhead_handle` for each job, from up to `max_in_flight`
 * threads at once. With `max_in_flight = 1` it is always the same thread.
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
 * A crash, a hang or a leak in here costs this process and the jobs in it,
 * never the caller.
 *
 * A process that the library forks is not the worker: it must end itself with
 * _exit(), also when exec() fails. If it returns from the handler, the host
 * ends it with status 1. Close only descriptors that the library opened: a
 * worker that lost its link ends at once or with its next heartbeat.
 */
#ifndef BULKHEAD_H
#define BULKHEAD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of everything below. A host refuses a library whose version it
 * does not know, before it calls anything in it. */
#define BULKHEAD_ABI_VERSION 1u

/* Put this once at file scope: it tells the host what the library was built for. */
#define BULKHEAD_LIBRARY const uint32_t bulkhead_abi_version = BULKHEAD_ABI_VERSION;

/* One job. Everything it points to is valid until the handler returns. */
typedef struct bulkhead_job {
    uint32_t struct_size;      /* sizeof(bulkhead_job) as the host knows it */
    uint32_t reserved;
    uint64_t number;           /* names the job in outcomes, logs and events, which write it as "%" PRIx64 does */
    const char *operation;     /* never NULL; "" if the caller named none */
    const char *tenant;        /* never NULL; "" if the caller named none */
    const uint8_t *payload;    /* never NULL, even if payload_len is 0 */
    size_t payload_len;        /* bytes */
    void *host_data;           /* the host's own; leave it alone */
} bulkhead_job;

/* For `flags` of bulkhead_host.error: add them up. */
#define BULKHEAD_RETRYABLE    1u  /* the same job may succeed later */
#define BULKHEAD_CALLER_FAULT 2u  /* the payload is to blame, not the library */

/* What the host offers to a handler. */
typedef struct bulkhead_host {
    uint32_t struct_size;      /* sizeof(bulkhead_host) as the host knows it */
    uint32_t abi_version;

    /* Appends `len` bytes to the result; call it as often as you like. The
     * bytes are copied. Returns 0, or -1 once the result is larger than
     * `max_result`: the job then ends as `failed` / `result_too_large`. */
    int (*result)(const bulkhead_job *job, const void *data, size_t len);

    /* Says why the handler is about to return non-zero. `code` is a short
     * word for programs ("bad_header"), `message` a sentence for people; both
     * are copied, and NULL counts as "". Without it the code is "error_N"
     * with N the value returned. */
    void (*error)(const bulkhead_job *job, const char *code, const char *message, uint32_t flags);

    /* Non-zero once the job was cancelled or its deadline has passed. A
     * handler that looks at it now and then is spared from being killed. */
    int (*is_cancelled)(const bulkhead_job *job);

    /* Milliseconds until the deadline, 0 when it has passed. */
    uint64_t (*remaining_ms)(const bulkhead_job *job);

    /* Tells the caller how far the job is: 0.0 to 1.0, and a few words or NULL. */
    void (*progress)(const bulkhead_job *job, double fraction, const char *text);
} bulkhead_host;

/* Handles one job. 0: `ok`, with what was given to host->result. Otherwise
 * `failed`, with what was given to host->error. */
int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host);

/* Optional. Runs once before the first job; the time it may take is
 * `start.ready`. 0: ready. Otherwise the worker does not start, and the words
 * written to `message` (at most `size` bytes, with the final NUL) say why. */
int bulkhead_init(char *message, size_t size);

#ifdef __cplusplus
}
#endif
#endif
