/* What de-duplication computes of every picture and every pair: data_tools/dedup says what it is for.
 *
 * Each float is computed by one operation after the other in the order written here (-ffp-contract=off, no sum in
 * another order): every processor finds the same. Nothing but the distances of hashes has code for one processor. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "images.h"

enum { SIDE = 64, GRID = 32, PIXELS = GRID * GRID, FREQUENCIES = 16 }; /* as in data_tools/dedup */

/* ------------------------------------------------------------------------------------------------------ brightness */

/* A box of a picture, each pixel the mean of the area that it covers. Integers throughout, so exact; a picture of up to
 * 2^24 rows and 2^40 pixels. Returns OK or NO_MEMORY. */
FOR_EVERY_PROCESSOR
int vitscale_square_luma(const uint8_t *rgb, int64_t picture_width, const int64_t *box, uint8_t *luma) {
    const int64_t top = box[0], left = box[1], height = box[2], width = box[3];
    uint32_t *sums = calloc((size_t)(SIDE * 3 * width), sizeof *sums); /* over rows, in 1/64ths of a row */
    uint64_t *gray = malloc((size_t)width * sizeof *gray);
    if (sums == NULL || gray == NULL) {
        free(sums), free(gray);
        return NO_MEMORY;
    }
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *row = rgb + ((top + y) * picture_width + left) * 3;
        const int64_t begin = y * SIDE, end = begin + SIDE;
        for (int64_t k = begin / height; k <= (end - 1) / height; k++) {
            const int64_t from = k * height > begin ? k * height : begin, to = (k + 1) * height < end ? (k + 1) * height : end;
            const uint32_t share = (uint32_t)(to - from);
            uint32_t *out = sums + k * 3 * width;
            for (int64_t i = 0; i < 3 * width; i++) out[i] += share * row[i];
        }
    }
    const uint64_t area = (uint64_t)1000 * (uint64_t)height * (uint64_t)width;
    for (int64_t k = 0; k < SIDE; k++) {
        const uint32_t *row = sums + k * 3 * width;
        for (int64_t x = 0; x < width; x++)
            gray[x] = 299 * (uint64_t)row[3 * x] + 587 * (uint64_t)row[3 * x + 1] + 114 * (uint64_t)row[3 * x + 2];
        for (int64_t j = 0; j < SIDE; j++) {
            const int64_t begin = j * width, end = begin + width, first = begin / SIDE, last = (end - 1) / SIDE;
            uint64_t total = 0;
            for (int64_t x = first; x <= last; x++) total += gray[x];
            total *= SIDE;
            total -= (uint64_t)(begin - first * SIDE) * gray[first] + (uint64_t)((last + 1) * SIDE - end) * gray[last];
            luma[k * SIDE + j] = (uint8_t)((total + area / 2) / area);
        }
    }
    free(sums), free(gray);
    return OK;
}

static int brightness(const uint8_t *pixel) { return (299 * pixel[0] + 587 * pixel[1] + 114 * pixel[2] + 500) / 1000; }

/* Whether `count` pixels, `stride` bytes apart, all have about this brightness, but for one in a hundred. */
static int is_uniform(const uint8_t *pixel, int64_t count, int64_t stride, int level) {
    enum { NEAR = 16 }; /* of 255: JPEG rings beside a border */
    int64_t allowed = count - (int64_t)ceil(0.99 * (double)count);
    for (; count > 0; count--, pixel += stride)
        if (abs(brightness(pixel) - level) > NEAR && --allowed < 0) return 0;
    return 1;
}

/* Strips rows, then columns of the remaining rows, while they are as bright as the corner that they start at.
 * box: top, left, height, width; the whole picture if nothing remains. */
void vitscale_without_borders(const uint8_t *rgb, int64_t height, int64_t width, int64_t *box) {
    const int64_t down = 3 * width;
    int64_t top = 0, bottom = height, left = 0, right = width;
    int level = brightness(rgb);
    while (top < bottom && is_uniform(rgb + top * down, width, 3, level)) top++;
    level = brightness(rgb + (height - 1) * down);
    while (bottom > top && is_uniform(rgb + (bottom - 1) * down, width, 3, level)) bottom--;
    if (top < bottom) {
        const uint8_t *first = rgb + top * down;
        level = brightness(first);
        while (left < right && is_uniform(first + 3 * left, bottom - top, down, level)) left++;
        level = brightness(first + 3 * (width - 1));
        while (right > left && is_uniform(first + 3 * (right - 1), bottom - top, down, level)) right--;
    }
    const int is_empty = top == bottom || left == right;
    box[0] = is_empty ? 0 : top, box[1] = is_empty ? 0 : left;
    box[2] = is_empty ? height : bottom - top, box[3] = is_empty ? width : right - left;
}

/* ------------------------------------------------------------------------------------------------------------- PDQ */

/* lumas (count, 64, 64) -> values (count, 16, 16), zeroed before: cosines (16, 64) x luma x cosines transposed, summed in
 * the order of Meta's code, because a matrix product would round differently. */
FOR_EVERY_PROCESSOR
void vitscale_lowest_frequencies(const uint8_t *lumas, int64_t count, const float *cosines, float *values) {
    for (int64_t n = 0; n < count; n++, lumas += SIDE * SIDE, values += FREQUENCIES * FREQUENCIES) {
        float rows[FREQUENCIES][SIDE] = {{0}};
        for (int i = 0; i < SIDE; i++)
            for (int k = 0; k < FREQUENCIES; k++)
                for (int x = 0; x < SIDE; x++) rows[k][x] += cosines[k * SIDE + i] * (float)lumas[i * SIDE + x];
        for (int i = 0; i < SIDE; i++)
            for (int k = 0; k < FREQUENCIES; k++)
                for (int m = 0; m < FREQUENCIES; m++) values[k * FREQUENCIES + m] += rows[k][i] * cosines[m * SIDE + i];
    }
}

/* ---------------------------------------------------------------------------------------------- distances of hashes */

typedef struct {
    const uint64_t *queries, *index; /* (4, num_queries), (4, num_hashes) */
    int64_t num_queries, num_hashes;
    int64_t *pairs, room, found; /* (room, 3): query, hash, distance; how many were found, whether or not there is room */
} Search;

static void note(Search *s, int64_t query, int64_t hash, int64_t distance) {
    if (s->found < s->room) {
        int64_t *pair = s->pairs + 3 * s->found;
        pair[0] = query, pair[1] = hash, pair[2] = distance;
    }
    s->found++;
}

/* Compares all queries with the hashes [start, stop), one after the other; `popcount` becomes what the processor has. */
static inline __attribute__((always_inline)) void by_words(Search *s, int64_t limit, int64_t start, int64_t stop) {
    const uint64_t *q = s->queries, *h = s->index;
    const int64_t Q = s->num_queries, N = s->num_hashes;
    for (int64_t query = 0; query < Q; query++)
        for (int64_t i = start; i < stop; i++) {
            const int64_t distance =
                __builtin_popcountll(h[i] ^ q[query]) + __builtin_popcountll(h[N + i] ^ q[Q + query]) +
                __builtin_popcountll(h[2 * N + i] ^ q[2 * Q + query]) + __builtin_popcountll(h[3 * N + i] ^ q[3 * Q + query]);
            if (distance <= limit) note(s, query, i, distance);
        }
}

static void on_any_processor(Search *s, int64_t limit, int64_t start, int64_t stop) { by_words(s, limit, start, stop); }

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Four hashes at a time: the bits of each half byte are looked up in a table (Mula's method). */
__attribute__((target("avx2,popcnt"))) static void by_avx2(Search *s, int64_t limit, int64_t start, int64_t stop) {
    const __m256i halves = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2,
                                            2, 3, 2, 3, 3, 4);
    const __m256i low = _mm256_set1_epi8(15), zero = _mm256_setzero_si256(), bound = _mm256_set1_epi64x(limit);
    const int64_t whole = start + (stop - start) / 4 * 4;
    for (int64_t query = 0; query < s->num_queries; query++) {
        __m256i words[4];
        for (int k = 0; k < 4; k++) words[k] = _mm256_set1_epi64x((long long)s->queries[k * s->num_queries + query]);
        for (int64_t i = start; i < whole; i += 4) {
            __m256i bits = zero;
            for (int k = 0; k < 4; k++) {
                const __m256i hashes = _mm256_loadu_si256((const __m256i *)(s->index + k * s->num_hashes + i));
                const __m256i differing = _mm256_xor_si256(hashes, words[k]);
                const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(differing, 4), low);
                bits = _mm256_add_epi8(bits, _mm256_shuffle_epi8(halves, _mm256_and_si256(differing, low)));
                bits = _mm256_add_epi8(bits, _mm256_shuffle_epi8(halves, upper));
            }
            const __m256i distances = _mm256_sad_epu8(bits, zero);
            const int far = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(distances, bound)));
            if (far != 15) {
                int64_t each[4];
                _mm256_storeu_si256((__m256i *)each, distances);
                for (int lane = 0; lane < 4; lane++)
                    if (!(far >> lane & 1)) note(s, query, i + lane, each[lane]);
            }
        }
    }
    by_words(s, limit, whole, stop);
}

/* Eight hashes at a time, by the instruction that counts bits. */
__attribute__((target("avx512f,avx512vpopcntdq,popcnt"))) static void by_avx512(Search *s, int64_t limit, int64_t start,
                                                                                int64_t stop) {
    const __m512i bound = _mm512_set1_epi64(limit);
    const int64_t whole = start + (stop - start) / 8 * 8;
    for (int64_t query = 0; query < s->num_queries; query++) {
        __m512i words[4];
        for (int k = 0; k < 4; k++) words[k] = _mm512_set1_epi64((long long)s->queries[k * s->num_queries + query]);
        for (int64_t i = start; i < whole; i += 8) {
            __m512i distances = _mm512_setzero_si512();
            for (int k = 0; k < 4; k++) {
                const __m512i hashes = _mm512_loadu_si512(s->index + k * s->num_hashes + i);
                distances = _mm512_add_epi64(distances, _mm512_popcnt_epi64(_mm512_xor_si512(hashes, words[k])));
            }
            const unsigned near = _mm512_cmple_epi64_mask(distances, bound);
            if (near) {
                int64_t each[8];
                _mm512_storeu_si512(each, distances);
                for (int lane = 0; lane < 8; lane++)
                    if (near >> lane & 1) note(s, query, i + lane, each[lane]);
            }
        }
    }
    by_words(s, limit, whole, stop);
}

static void (*chosen(int64_t kind))(Search *, int64_t, int64_t, int64_t) {
    const int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vpopcntdq");
    if (kind == 0 && has_avx512) return by_avx512;
    return kind != 1 && __builtin_cpu_supports("avx2") ? by_avx2 : on_any_processor;
}
#else
static void (*chosen(int64_t kind))(Search *, int64_t, int64_t, int64_t) { return (void)kind, on_any_processor; }
#endif

/* All pairs that differ in at most `limit` bits; as many as fit are written. Returns how many there are.
 * kind: 0 for the fastest way of this processor, 1 for that of any, 2 for at most AVX2 (for tests). */
int64_t vitscale_near_pairs(const uint64_t *queries, int64_t num_queries, const uint64_t *index, int64_t num_hashes,
                            int64_t limit, int64_t start, int64_t stop, int64_t *pairs, int64_t room, int kind) {
    enum { BLOCK = 1024 }; /* hashes: 32 KiB, which stay in the L1 cache while all queries pass */
    Search search = {queries, index, num_queries, num_hashes, pairs, room, 0};
    void (*compare)(Search *, int64_t, int64_t, int64_t) = chosen(kind);
    for (; start < stop; start += BLOCK) compare(&search, limit, start, start + BLOCK < stop ? start + BLOCK : stop);
    return search.found;
}

/* ------------------------------------------------------------------------------------------------------- alignment */

static const float STEP = 1.0f / GRID;

/* Where the window's 32 x 32 pixels are: the image, its gradients (bilinear), and whether that is within both borders. */
typedef struct {
    float value[PIXELS], down[PIXELS], across[PIXELS], weight[PIXELS];
} Warped;

static float offset(int pixel) { return ((float)pixel + 0.5f) * STEP - 0.5f; } /* in fractions of the window */

static float within(float position) { /* the image, also where it is no number */
    const float last = (float)(SIDE - 1.001);
    const float least = position > 0 ? position : 0;
    return least < last ? least : last;
}

static void warp(const uint8_t *image, const float *window, const float *seen, const float *box, Warped *out) {
    for (int row = 0, i = 0; row < GRID; row++) {
        const float v = offset(row);
        for (int column = 0; column < GRID; column++, i++) {
            const float u = offset(column);
            float y = window[0] + window[1] * u + window[2] * v, x = window[3] + window[4] * u + window[5] * v;
            const int is_seen = seen[0] <= row && row <= seen[2] && seen[1] <= column && column <= seen[3];
            out->weight[i] = is_seen && box[0] <= y && y <= box[2] && box[1] <= x && x <= box[3];
            y = within(y), x = within(x);
            const int top = (int)y, left = (int)x;
            const float fy = y - (float)top, fx = x - (float)left;
            const uint8_t *corner = image + top * SIDE + left;
            const float a = corner[0], b = corner[1], c = corner[SIDE], d = corner[SIDE + 1];
            const float upper = a + (b - a) * fx, lower = c + (d - c) * fx;
            out->value[i] = upper + (lower - upper) * fy;
            out->down[i] = lower - upper;
            out->across[i] = (b - a) * (1 - fy) + (d - c) * fy;
        }
    }
}

/* Pearson's correlation of the pixels with weight 1; 0 if those are under a tenth, or without contrast. */
static float correlate(const float *a, const Warped *b) {
    float count = 0, mean_a = 0, mean_b = 0;
    for (int i = 0; i < PIXELS; i++) {
        count += b->weight[i];
        mean_a += b->weight[i] * a[i];
        mean_b += b->weight[i] * b->value[i];
    }
    if (count < (float)(0.1 * PIXELS)) return 0;
    mean_a /= count;
    mean_b /= count;
    float aa = 0, bb = 0, ab = 0;
    for (int i = 0; i < PIXELS; i++) {
        const float da = b->weight[i] * (a[i] - mean_a), db = b->weight[i] * (b->value[i] - mean_b);
        aa += da * da;
        bb += db * db;
        ab += da * db;
    }
    if (aa < 1e-3f * count || bb < 1e-3f * count) return 0;
    return ab / sqrtf(aa * bb);
}

/* Solves a positive definite system by Cholesky; zeros if the matrix is not positive definite. */
static void solve(double matrix[8][8], const double *right, double *solution) {
    double lower[8][8] = {{0}};
    memset(solution, 0, 8 * sizeof *solution);
    for (int row = 0; row < 8; row++)
        for (int column = 0; column <= row; column++) {
            double total = matrix[row][column];
            for (int k = 0; k < column; k++) total -= lower[row][k] * lower[column][k];
            if (row == column && !(total > 0)) return;
            lower[row][column] = row == column ? sqrt(total) : total / lower[column][column];
        }
    for (int row = 0; row < 8; row++) {
        double total = right[row];
        for (int k = 0; k < row; k++) total -= lower[row][k] * solution[k];
        solution[row] = total / lower[row][row];
    }
    for (int row = 7; row >= 0; row--) {
        double total = solution[row];
        for (int k = row + 1; k < 8; k++) total -= lower[k][row] * solution[k];
        solution[row] = total / lower[row][row];
    }
}

/* Least-squares step: changes of the window's six numbers, then contrast and brightness. */
static void least_squares(const float *target, const Warped *warped, double *change) {
    float products[9][8] = {{0}}; /* of the eight columns with each other, and with the target */
    for (int i = 0; i < PIXELS; i++) {
        const float u = offset(i % GRID), v = offset(i / GRID), down = warped->down[i], across = warped->across[i];
        const float each[8] = {down, down * u, down * v, across, across * u, across * v, warped->value[i], 1};
        float row[9];
        for (int k = 0; k < 8; k++) row[k] = each[k] * warped->weight[i];
        row[8] = target[i];
        for (int k = 0; k < 9; k++)
            for (int m = 0; m < 8; m++) products[k][m] += row[k] * row[m];
    }
    double matrix[8][8], right[8];
    for (int k = 0; k < 8; k++) {
        right[k] = products[8][k];
        for (int m = 0; m < 8; m++) matrix[k][m] = products[k][m];
        matrix[k][k] = matrix[k][k] * (1 + 1e-6) + 1e-6;
    }
    solve(matrix, right, change);
}

/* How far it may go: pixels of 64 by which it moves or its sides turn, and by how much it is stretched. */
static const double FARTHEST = 8, STRETCH = 1.25;

static int is_near(const float *window, const float *start) {
    for (int i = 0; i < 6; i++) {
        const int is_side = i == 2 || i == 4;
        const float stretched = window[i] / start[i];
        if (!(is_side ? stretched > 1 / STRETCH && stretched < STRETCH : fabsf(window[i] - start[i]) < FARTHEST)) return 0;
    }
    return 1;
}

/* The best correlation of a query's luma with a window of an image's, found from `start`: y, its change by u and v, the
 * same for x; u, v in [-1/2, 1/2]. seen, box: see `_pixels` in matching.py. */
float vitscale_aligned(const uint8_t *query, const uint8_t *image, const float *start, const float *seen,
                       const float *box) {
    enum { STEPS = 8 };
    const double enough = 1e-4; /* smallest gain in correlation that is worth another step */
    float target[PIXELS], window[6];
    Warped warped;
    for (int i = 0; i < PIXELS; i++) { /* means of 2 x 2 pixels */
        const uint8_t *corner = query + i / GRID * 2 * SIDE + i % GRID * 2;
        target[i] = (float)(corner[0] + corner[1] + corner[SIDE] + corner[SIDE + 1]) * 0.25f;
    }
    memcpy(window, start, sizeof window);
    warp(image, window, seen, box, &warped);
    float best = correlate(target, &warped);
    for (int step = 0; step < STEPS; step++) {
        double change[8];
        least_squares(target, &warped, change);
        const double gain = change[6];
        if (!(gain > 0.05)) break; /* the picture would have to be inverted, or there is no solution */
        float moved[6];
        for (int i = 0; i < 6; i++) moved[i] = window[i] + (float)(change[i] / gain);
        if (!is_near(moved, start)) break;
        warp(image, moved, seen, box, &warped);
        const float reached = correlate(target, &warped);
        if (!(reached > best + enough)) {
            best = reached > best ? reached : best;
            break;
        }
        best = reached;
        memcpy(window, moved, sizeof window);
    }
    return best;
}
