/* Whatever the bytes of a file are: no read or write outside of its memory, and one verdict however it is asked for.
 *
 * With libFuzzer: `make fuzz`. It sees far more where libjpeg-turbo is compiled for it, too, from its source in FOLDER:
 *
 *     cmake -S FOLDER -B jpeg -DCMAKE_C_COMPILER=clang -DCMAKE_C_FLAGS="-g -O1 -fsanitize=fuzzer-no-link,address" \
 *         -DENABLE_SHARED=0 -DWITH_TURBOJPEG=0 -DWITH_SIMD=0 && cmake --build jpeg --target jpeg-static
 *     make fuzz LIBJPEG="-Ijpeg -IFOLDER jpeg/libjpeg.a"
 *
 * Without libFuzzer, and for AFL, it looks at the files that it is given: `make sanitize`. Of the files that libFuzzer has
 * made, tests/images/corpus holds enough to reach every branch that all of them reach.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "images.h"

uint32_t vitscale_crc32c_by_tables(const uint8_t *data, uint64_t size);
void vitscale_decode_slice(const uint8_t *stored, int64_t stored_bytes, int64_t count, const int64_t *starts,
                           const int64_t *sizes, const uint32_t *crcs, const uint8_t *checked, const uint8_t *raw,
                           const int64_t *heights, const int64_t *widths, const int32_t *boxes, const uint8_t *flips,
                           int64_t views, const int64_t *sides, const int64_t *resizes, uint8_t *const *outs,
                           const int64_t *strides, int may_scale, int32_t *status);

#ifdef LIBFUZZER
enum { MAX_PIXELS = 1 << 14 }; /* many small pictures find more than a few large ones */
#else
enum { MAX_PIXELS = 1 << 20 };
#endif
enum { SLICE = 6, LENGTH = 3, KERNELS = 4 };

static void require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

/* Any program of three operations for each picture. Values are what the recipe's operations draw, and beyond that. */
static void change(uint8_t *images, int64_t side, const int32_t *statuses, uint32_t drawn) {
    Instruction programs[SLICE][LENGTH];
    memset(programs, 0, sizeof programs);
    for (int i = 0; i < SLICE * LENGTH; i++) {
        Instruction *one = &programs[i / LENGTH][i % LENGTH];
        drawn = drawn * 1664525u + 1013904223u;
        one->code = (int32_t)((drawn >> 24) % 14), one->interpolation = (int32_t)((drawn >> 16) % 3);
        const double far = drawn & 256 ? 0.999 / (1 << 16) : 1.0 / (1 << 22);
        const double scale = one->code == 11 ? far : one->code == 12 ? 1.0 / (1 << 18) : 1.0 / (1 << 16);
        for (int k = 0; k < 6; k++) {
            drawn = drawn * 1664525u + 1013904223u;
            one->values[k] = (double)(int32_t)(one->code > 10 && one->code < 13 ? drawn : drawn >> 8) * scale;
        }
        if (one->code == 11 && drawn & 1024) one->values[0] = one->values[4] = 1.0, one->values[2] = one->values[5] = 0.0;
        if (one->code == 11 && drawn & 2048) one->values[1] = 0.0;
        if (one->code == 11 && drawn & 4096) one->values[3] = 0.0;
    }
    programs[0][0] = (Instruction){.code = 11, .interpolation = 1, .values = {1, 0, 0, 32767, 1, 0}}; /* far outside */
    require(vitscale_operate(images, SLICE, side, programs[0], LENGTH, statuses) == OK, "pictures are not changed");
}

/* Memory of exactly so many bytes, so that one more is found. */
static uint8_t *exactly(size_t size) {
    uint8_t *memory = malloc(size ? size : 1);
    require(memory != NULL, "no memory");
    return memory;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint8_t *file = exactly(size);
    if (size) memcpy(file, data, size);
    const uint32_t crc = vitscale_crc32c(file, size);
    require(crc == vitscale_crc32c_by_tables(file, size), "two checksums");

    Header header;
    vitscale_header(file, size, &header);
    int64_t height = header.height, width = header.width;
    if (height * width == 0 || height * width > MAX_PIXELS) height = 40, width = 56;
    const size_t bytes = (size_t)(height * width * 3);
    uint8_t *fast = exactly(bytes), *slow = exactly(bytes);
    const int status = vitscale_decode(file, size, height, width, 0, fast);
    require(status == vitscale_decode(file, size, height, width, 1, slow), "the exact DCT has another verdict");
    require(status == vitscale_decode(file, size, height, width, 0, NULL), "without pixels there is another verdict");

    /* What is shown depends on the bytes: a fuzzer finds its way. The last one is stored as pixels. */
    uint32_t drawn = crc;
    const int64_t side = 1 + drawn % 90;
    int64_t starts[SLICE], sizes[SLICE], heights[SLICE], widths[SLICE];
    uint32_t crcs[SLICE];
    uint8_t checked[SLICE], raw[SLICE] = {0}, flips[SLICE];
    int32_t boxes[SLICE][4], statuses[SLICE] = {0};
    for (int i = 0; i < SLICE; i++) {
        starts[i] = 0, sizes[i] = (int64_t)size, heights[i] = height, widths[i] = width, crcs[i] = crc;
        checked[i] = flips[i] = i % 2;
        drawn = drawn * 1664525u + 1013904223u;
        const int64_t h = i ? 1 + drawn % height : height, w = i ? 1 + (drawn >> 8) % width : width;
        boxes[i][0] = (int32_t)((drawn >> 4) % (height - h + 1)), boxes[i][2] = (int32_t)h;
        boxes[i][1] = (int32_t)((drawn >> 12) % (width - w + 1)), boxes[i][3] = (int32_t)w;
    }
    boxes[3][drawn % 4] = (int32_t)drawn;       /* any box, */
    starts[4] = (int64_t)(drawn % (size + 2)); /* and any place */
    raw[5] = 1;
    const int64_t picture = side * side * 3;
    int64_t sides[KERNELS], resizes[KERNELS], strides[KERNELS];
    uint8_t *alone[KERNELS], *together[KERNELS];
    for (int kernel = 0; kernel < KERNELS; kernel++) {
        sides[kernel] = side, resizes[kernel] = kernel, strides[kernel] = picture;
        alone[kernel] = exactly((size_t)(SLICE * picture)), together[kernel] = exactly((size_t)(SLICE * picture));
    }
    for (int way = -1; way < KERNELS; way++) { /* by area at less than full size, then by each kernel at full size */
        const int kernel = way < 0 ? AREA : way;
        memset(statuses, 0, sizeof statuses);
        vitscale_decode_slice(file, (int64_t)size, SLICE, starts, sizes, crcs, checked, raw, heights, widths, boxes[0],
                              flips, 1, sides, resizes + kernel, alone + kernel, strides, way < 0, statuses);
        require(statuses[0] == status, "a view of the whole has another verdict");
        for (int i = 1; i < 3; i++) require(status != OK || statuses[i] == OK, "a view of a good image is refused");
        if (way < 0) change(alone[kernel], side, statuses, drawn);
    }
    /* Each picture by all kernels from one decoding, with the box of the next picture for every other one. */
    int32_t several[SLICE][KERNELS][4];
    uint8_t turned[SLICE][KERNELS];
    for (int i = 0; i < SLICE; i++)
        for (int kernel = 0; kernel < KERNELS; kernel++) {
            const int from = i < 2 && kernel % 2 ? i + 1 : i;
            memcpy(several[i][kernel], boxes[from], sizeof boxes[from]), turned[i][kernel] = flips[from];
        }
    int32_t found[SLICE] = {0};
    vitscale_decode_slice(file, (int64_t)size, SLICE, starts, sizes, crcs, checked, raw, heights, widths, several[0][0],
                          turned[0], KERNELS, sides, resizes, together, strides, 0, found);
    for (int i = 0; i < 2; i++)
        for (int kernel = 0; kernel < KERNELS; kernel++) {
            const int64_t from = kernel % 2 ? i + 1 : i;
            require(status != OK || memcmp(together[kernel] + i * picture, alone[kernel] + from * picture,
                                           (size_t)picture) == 0, "several views at once are others than one by one");
        }
    for (int kernel = 0; kernel < KERNELS; kernel++) free(alone[kernel]), free(together[kernel]);
    if (status == OK) {
        uint64_t room = 6 * (uint64_t)((height + 7) / 8 * 8) * (uint64_t)((width + 7) / 8 * 8) + 2048;
        uint8_t *written = exactly(room);
        require(vitscale_encode(slow, height, width, 95, written, &room) == OK, "an image is not written");
        require(vitscale_decode(written, room, height, width, 0, fast) == OK, "what was written is refused");
        room /= 2;
        uint8_t *smaller = exactly(room);
        require(vitscale_encode(slow, height, width, 95, smaller, &room) == REFUSED, "a file is larger than its room");
        free(smaller);
        free(written);
    }
    free(slow);
    free(fast);
    free(file);
    return 0;
}

#ifndef LIBFUZZER
int main(int count, char **paths) {
    for (int i = 1; i < count; i++) {
        FILE *input = fopen(paths[i], "rb");
        require(input != NULL && fseek(input, 0, SEEK_END) == 0, paths[i]);
        const size_t size = (size_t)ftell(input);
        rewind(input);
        uint8_t *content = exactly(size);
        require(fread(content, 1, size, input) == size, paths[i]);
        fclose(input);
        LLVMFuzzerTestOneInput(content, size);
        free(content);
    }
    printf("%d files: nothing found\n", count - 1);
    return 0;
}
#endif
