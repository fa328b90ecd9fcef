/* One picture's box averaged to the model's input size and flipped, row by row, as the rows come.
 *
 * Resizing is the mean over the area that an output pixel covers, in both directions, whether that is many source pixels
 * or a part of one (OpenCV's INTER_AREA, but for pictures that shrink one way and grow the other, where OpenCV takes two
 * neighbours only). Sums over rows are whole numbers below 2^24, hence exact in float32; sums over columns are taken in
 * one order by plain multiplications and additions (no fused ones: -ffp-contract=off). So every processor gives the same
 * bits, with or without wide vectors.
 */
#include <stdlib.h>
#include <string.h>

#include "images.h"

Axis axis_of(int64_t start, int64_t length, int64_t side, int64_t scale) {
    return (Axis){start * side, length, side, side * scale};
}
int64_t first_pixel(const Axis *axis, int64_t output) { return (axis->start + output * axis->length) / axis->step; }
int64_t end_pixel(const Axis *axis, int64_t output) { /* one past the last */
    return (axis->start + (output + 1) * axis->length + axis->step - 1) / axis->step;
}
static int64_t overlap(const Axis *axis, int64_t output, int64_t pixel) {
    int64_t low = axis->start + output * axis->length, high = low + axis->length;
    int64_t from = pixel * axis->step, to = from + axis->step;
    if (from > low) low = from;
    if (to < high) high = to;
    return high > low ? high - low : 0;
}

static void resizer_begin_row(Resizer *r, int64_t row) {
    r->output_row = row;
    r->first_row = first_pixel(&r->rows, row);
    r->end_row = end_pixel(&r->rows, row);
}

/* A region begins at source column `left` and is `width` pixels wide. Returns 0 where there is no memory. */
int resizer_open(Resizer *r, Axis rows, Axis columns, int64_t left, int64_t width, int flip, uint8_t *out) {
    /* No output column touches more pixels than these; those that touch fewer have weights of zero. */
    const int64_t side = columns.side, taps = (columns.length + columns.step - 1) / columns.step + 1;
    const int64_t pairs = (side + 1) / 2, sums = (3 * (width + taps) + 8 + 7) & ~7, means = (6 * pairs + 8 + 7) & ~7;
    r->memory = calloc((size_t)(8 * pairs * taps + sums + means + 2 * pairs + 8), 4);
    if (!r->memory) return 0;
    r->rows = rows, r->columns = columns, r->values = 3 * width, r->taps = (int)taps, r->out = out;
    r->weights = (Lanes *)(((uintptr_t)r->memory + 31) & ~(uintptr_t)31);
    r->sums = (float *)(r->weights + pairs * taps);
    r->means = r->sums + sums;
    r->first = (int32_t *)(r->means + means);
    const float whole = (float)((double)rows.length * (double)columns.length);
    for (int64_t i = 0; i < side; i++) {
        const int64_t column = flip ? side - 1 - i : i, first = first_pixel(&columns, column);
        r->first[i] = (int32_t)(3 * (first - left));
        for (int64_t tap = 0; tap < taps; tap++) {
            const float weight = (float)overlap(&columns, column, first + tap) / whole;
            for (int lane = 0; lane < 4; lane++) r->weights[i / 2 * taps + tap][4 * (i % 2) + lane] = weight;
        }
    }
    resizer_begin_row(r, 0);
    return 1;
}

FOR_EVERY_PROCESSOR
static void begin_sums(float *restrict sums, const uint8_t *restrict row, float weight, int64_t values) {
    for (int64_t i = 0; i < values; i++) sums[i] = weight * (float)row[i];
}

FOR_EVERY_PROCESSOR
static void add_to_sums(float *restrict sums, const uint8_t *restrict row, float weight, int64_t values) {
    for (int64_t i = 0; i < values; i++) sums[i] += weight * (float)row[i];
}

/* Two pixels at a time, four lanes each: three values, and one that does not matter. What is read and written too much
 * lies in spare room, or is replaced by the next pixels. */
#define MEANS_OF(TAPS)                                                                                \
    for (int64_t i = 0; i < side; i += 2) {                                                           \
        const float *one = sums + first[i], *other = sums + first[i + 1];                             \
        Lanes total = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};                               \
        for (int tap = 0; tap < (TAPS); tap++, one += 3, other += 3, weights++) {                     \
            Lanes a, b;                                                                               \
            memcpy(&a, one, sizeof a);                                                                \
            memcpy(&b, other, sizeof b);                                                              \
            total += LOWER_HALVES(a, b) * *weights;                                                   \
        }                                                                                             \
        const Lanes second = UPPER_HALF(total);                                                       \
        memcpy(means + 3 * i, &total, sizeof total);                                                  \
        memcpy(means + 3 * i + 3, &second, sizeof second);                                            \
    }

FOR_EVERY_PROCESSOR
static void finish_row(const float *restrict sums, const int32_t *restrict first, const Lanes *restrict weights, int taps,
                       int64_t side, float *restrict means, uint8_t *restrict out) {
    switch (taps) { /* the usual ones with a known end */
        case 2: MEANS_OF(2) break;
        case 3: MEANS_OF(3) break;
        case 4: MEANS_OF(4) break;
        default: MEANS_OF(taps)
    }
    for (int64_t i = 0; i < 3 * side; i++) out[i] = (uint8_t)(int32_t)means[i];
}

/* The next row of the region; `pixel` is its number in the source. */
void resizer_take(Resizer *r, int64_t pixel, const uint8_t *row) {
    const int64_t side = r->rows.side;
    while (r->output_row < side && pixel >= r->first_row) {
        const float weight = (float)overlap(&r->rows, r->output_row, pixel);
        if (pixel == r->first_row)
            begin_sums(r->sums, row, weight, r->values);
        else
            add_to_sums(r->sums, row, weight, r->values);
        if (pixel + 1 < r->end_row) return;
        finish_row(r->sums, r->first, r->weights, r->taps, side, r->means, r->out + r->output_row * side * 3);
        resizer_begin_row(r, r->output_row + 1);
    }
}

void resizer_close(Resizer *r) { free(r->memory); }
