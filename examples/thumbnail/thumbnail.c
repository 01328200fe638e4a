/*
 * thumbnail.c - makes PNG thumbnails of at most 128 x 128 pixels with stb_image.
 *
 * build.rs compiles this file to libthumbnail.so. For each job of the bulkhead
 * `thumbnail` in workers.toml, the host bulkhead-worker calls bulkhead_handle.
 * The payload is a picture in any format that stb_image can read. The code does
 * not guard against the memory bugs of stb_image 2.06, because the bulkhead
 * contains their effects.
 */
#include <bulkhead.h>

#include <stdlib.h>
#include <string.h>

/* stb_image.h defines STB_IMAGE_IMPLEMENTATION itself (see vendor/README.md). */
#define STBI_NO_STDIO
#include "vendor/stb_image.h"

BULKHEAD_LIBRARY

enum { SIDE_MAX = 128, CHANNELS = 3 };

/* Scales `from` down to `width` x `height`. Each new pixel is the average of the
 * pixels that it covers. */
static void box_scale(const uint8_t *from, int from_width, int from_height,
                      uint8_t *to, int width, int height)
{
    for (int y = 0; y < height; y++) {
        int top = (int)((int64_t)y * from_height / height);
        int bottom = (int)((int64_t)(y + 1) * from_height / height);
        for (int x = 0; x < width; x++) {
            int left = (int)((int64_t)x * from_width / width);
            int right = (int)((int64_t)(x + 1) * from_width / width);
            uint64_t sum[CHANNELS] = {0};
            for (int v = top; v < bottom; v++)
                for (int u = left; u < right; u++)
                    for (int c = 0; c < CHANNELS; c++)
                        sum[c] += from[((size_t)v * from_width + u) * CHANNELS + c];
            uint64_t covered = (uint64_t)(bottom - top) * (right - left);
            for (int c = 0; c < CHANNELS; c++)
                *to++ = (uint8_t)(sum[c] / covered);
        }
    }
}

static uint8_t *put32(uint8_t *at, uint32_t value)
{
    for (int shift = 24; shift >= 0; shift -= 8)
        *at++ = (uint8_t)(value >> shift);
    return at;
}

/* Passes one PNG chunk to the host: its length, type, data and checksum. */
static void png_chunk(const bulkhead_job *job, const bulkhead_host *host,
                      const char *type, const uint8_t *data, uint32_t len)
{
    uint8_t head[8], tail[4];
    uint32_t crc = 0xffffffff;
    memcpy(put32(head, len), type, 4);
    for (uint32_t i = 0; i < 4 + len; i++) {
        crc ^= i < 4 ? (uint8_t)type[i] : data[i - 4];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
    }
    put32(tail, ~crc);
    host->result(job, head, sizeof head);
    host->result(job, data, len);
    host->result(job, tail, sizeof tail);
}

/* Writes the pixels as a PNG with uncompressed data. The data of a thumbnail
 * fits into a single stored block (at most 65,535 bytes). */
static void write_png(const bulkhead_job *job, const bulkhead_host *host,
                      const uint8_t *pixels, int width, int height)
{
    uint8_t header[13] = {0};
    put32(put32(header, (uint32_t)width), (uint32_t)height);
    header[8] = 8; /* bits per channel */
    header[9] = 2; /* red, green, blue */

    static const uint8_t zlib_header[2] = {0x78, 0x01};
    uint8_t data[2 + 5 + SIDE_MAX * (1 + SIDE_MAX * CHANNELS) + 4];
    uint32_t row = (uint32_t)width * CHANNELS, stored = (uint32_t)height * (1 + row);
    uint8_t *at = data;
    memcpy(at, zlib_header, sizeof zlib_header);
    at += sizeof zlib_header;
    *at++ = 1; /* last block, not compressed */
    *at++ = (uint8_t)stored;
    *at++ = (uint8_t)(stored >> 8);
    *at++ = (uint8_t)~stored;
    *at++ = (uint8_t)(~stored >> 8);
    uint8_t *rows = at;
    for (int y = 0; y < height; y++, pixels += row) {
        *at++ = 0; /* no filter */
        memcpy(at, pixels, row);
        at += row;
    }
    uint32_t a = 1, b = 0; /* Adler-32 */
    for (uint8_t *byte = rows; byte < at; byte++) {
        a = (a + *byte) % 65521;
        b = (b + a) % 65521;
    }
    at = put32(at, b << 16 | a);

    host->result(job, "\x89PNG\r\n\x1a\n", 8);
    png_chunk(job, host, "IHDR", header, sizeof header);
    png_chunk(job, host, "IDAT", data, (uint32_t)(at - data));
    png_chunk(job, host, "IEND", data, 0);
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    if (strcmp(job->operation, "") != 0 && strcmp(job->operation, "thumbnail") != 0) {
        host->error(job, "unknown_operation", "this library knows \"thumbnail\" only",
                    BULKHEAD_CALLER_FAULT);
        return 1;
    }

    int width, height, channels;
    uint8_t *picture = stbi_load_from_memory(job->payload, (int)job->payload_len,
                                             &width, &height, &channels, CHANNELS);
    if (picture == NULL) {
        host->error(job, "not_an_image", stbi_failure_reason(), BULKHEAD_CALLER_FAULT);
        return 1;
    }

    int longer = width > height ? width : height;
    int scaled_width = width, scaled_height = height;
    if (longer > SIDE_MAX) {
        scaled_width = (int)((int64_t)width * SIDE_MAX / longer);
        scaled_height = (int)((int64_t)height * SIDE_MAX / longer);
        scaled_width += scaled_width == 0;
        scaled_height += scaled_height == 0;
    }
    uint8_t scaled[SIDE_MAX * SIDE_MAX * CHANNELS];
    box_scale(picture, width, height, scaled, scaled_width, scaled_height);
    stbi_image_free(picture);
    write_png(job, host, scaled, scaled_width, scaled_height);
    return 0;
}
