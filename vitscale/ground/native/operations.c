/* Augmentation of decoded pictures, in place: Pillow's operations on uint8, as programs of a few instructions a picture.
 *
 * What Pillow computes in whole numbers or in float32 is the same here to the last bit; affine transforms by bilinear or
 * bicubic interpolation, which it computes in doubles, differ by one grey value at most. No function of the mathematical
 * library but the square root, no fused arithmetic (-ffp-contract=off): every processor gives the same pixels.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "images.h"

enum { /* as in vitscale/ground/images.py */
    NOTHING,
    INVERT,
    SOLARIZE,     /* values: threshold */
    SOLARIZE_ADD, /* what is added to values below 128 */
    POSTERIZE,    /* bits that stay */
    AUTOCONTRAST,
    EQUALIZE,
    COLOR,        /* factor; 0 is gray */
    CONTRAST,     /* factor */
    BRIGHTNESS,   /* factor, and the value that it blends with: 0 is black */
    SHARPNESS,    /* factor */
    AFFINE,       /* a, b, c, d, e, f: output (x, y) shows (a x + b y + c, d x + e y + f); fill, interpolation */
    CUTOUT,       /* first row and column, end of rows and columns; fill */
    BLUR,         /* standard deviation in pixels */
    HUE,          /* what is added to the hue, in 256ths of a turn */
    KERNEL        /* pixels on each side of the middle; weights from the middle outwards, in units of 2^-12 */
};
enum { NEAREST, BILINEAR, BICUBIC };

enum { MARGIN = 2 };           /* pixels around a picture that interpolation may touch */
enum { PASSES = 3 };           /* of the box that stands for a Gaussian */
enum { MAX_RADIUS = 100 };     /* of that box: its sums have 16 bits */
enum { MAX_SIDE = 8192 };      /* places in 2^-32 pixels, times values below 32768, have 64 bits */
enum { STEPS = 1024 };         /* in which the place between two pixels is told */

/* The weights of four pixels, of which the place that is asked for lies between the second and the third. They are
 * multiples of 2^-14 with the sum 1, so that a float holds their sums over pixels of one row or column exactly. */
typedef struct {
    float of[4];
} Weights;

/* A column that is moved: its output rows from `first` to `end` show the source `offset` bytes from their own place. */
typedef struct {
    int64_t first, end, offset;
    const Weights *weights;
} Column;

/* A picture that is being changed, and memory beside it. */
typedef struct {
    uint8_t *pixels;  /* (side, side, 3) */
    int64_t side, row, values; /* bytes of a row, and of the picture */
    float *floats;    /* a picture with MARGIN pixels all around, and spare room */
    uint8_t *copy;    /* of the picture, in the same memory */
    uint8_t *line;    /* a row with MAX_RADIUS + 1 pixels at both ends */
    uint16_t *sums;   /* of a row */
    Column *columns;
} Picture;

/* ---------------------------------------------------------------------------------------------- one value at a time */

FOR_EVERY_PROCESSOR
static void solarize(uint8_t *pixels, int64_t values, uint8_t threshold) {
    for (int64_t i = 0; i < values; i++) pixels[i] = pixels[i] < threshold ? pixels[i] : (uint8_t)(255 - pixels[i]);
}

FOR_EVERY_PROCESSOR
static void solarize_add(uint8_t *pixels, int64_t values, uint8_t added) {
    const uint8_t room = (uint8_t)(255 - added);
    for (int64_t i = 0; i < values; i++) {
        const uint8_t sum = pixels[i] < room ? (uint8_t)(pixels[i] + added) : 255;
        pixels[i] = pixels[i] < 128 ? sum : pixels[i];
    }
}

FOR_EVERY_PROCESSOR
static void keep_bits(uint8_t *pixels, int64_t values, uint8_t mask) {
    for (int64_t i = 0; i < values; i++) pixels[i] &= mask;
}

/* Pillow's blend: float32, truncated. */
static inline uint8_t blended(float from, uint8_t to, float factor) {
    const float value = from + factor * ((float)to - from);
    return (uint8_t)(int32_t)(value > 0.0f ? (value < 255.0f ? value : 255.0f) : 0.0f);
}

FOR_EVERY_PROCESSOR
static void blend(uint8_t *restrict pixels, int64_t values, const uint8_t *restrict from, float factor) {
    for (int64_t i = 0; i < values; i++) pixels[i] = blended(from[i], pixels[i], factor);
}

/* ------------------------------------------------------------------------------------------------ by tables, and gray */

static void apply_tables(uint8_t *pixels, int64_t values, uint8_t tables[3][256]) {
    for (int64_t i = 0; i < values; i += 3)
        for (int channel = 0; channel < 3; channel++) pixels[i + channel] = tables[channel][pixels[i + channel]];
}

static void blend_one(uint8_t *pixels, int64_t values, float from, float factor) {
    uint8_t tables[3][256];
    for (int i = 0; i < 256; i++) tables[0][i] = tables[1][i] = tables[2][i] = blended(from, (uint8_t)i, factor);
    apply_tables(pixels, values, tables);
}

FOR_EVERY_PROCESSOR
static void extremes(const uint8_t *pixels, int64_t values, uint8_t low[3], uint8_t high[3]) {
    enum { BLOCK = 96 }; /* of whole pixels and whole vectors */
    uint8_t lows[BLOCK], highs[BLOCK];
    memset(lows, 255, BLOCK), memset(highs, 0, BLOCK);
    int64_t done = 0;
    for (; done + BLOCK <= values; done += BLOCK)
        for (int i = 0; i < BLOCK; i++) {
            const uint8_t value = pixels[done + i];
            lows[i] = value < lows[i] ? value : lows[i];
            highs[i] = value > highs[i] ? value : highs[i];
        }
    for (int i = 0; done + i < values; i++) {
        const uint8_t value = pixels[done + i];
        lows[i] = value < lows[i] ? value : lows[i];
        highs[i] = value > highs[i] ? value : highs[i];
    }
    memset(low, 255, 3), memset(high, 0, 3);
    for (int i = 0; i < BLOCK; i++) {
        low[i % 3] = lows[i] < low[i % 3] ? lows[i] : low[i % 3];
        high[i % 3] = highs[i] > high[i % 3] ? highs[i] : high[i % 3];
    }
}

static void autocontrast(Picture *p) {
    uint8_t low[3], high[3], tables[3][256];
    extremes(p->pixels, p->values, low, high);
    for (int channel = 0; channel < 3; channel++) {
        const int is_flat = high[channel] <= low[channel];
        const double scale = is_flat ? 1.0 : 255.0 / (high[channel] - low[channel]);
        const double offset = is_flat ? 0.0 : -low[channel] * scale;
        for (int i = 0; i < 256; i++) {
            const double value = i * scale + offset;
            tables[channel][i] = (uint8_t)(value > 0.0 ? (value < 255.0 ? value : 255.0) : 0.0);
        }
    }
    apply_tables(p->pixels, p->values, tables);
}

static void equalize(Picture *p) {
    int32_t counts[2][3][256] = {{{0}}}; /* two sets, so that equal neighbours do not wait for each other */
    for (int64_t i = 0, set = 0; i < p->values; i += 3, set ^= 1)
        for (int channel = 0; channel < 3; channel++) counts[set][channel][p->pixels[i + channel]]++;
    uint8_t tables[3][256];
    for (int channel = 0; channel < 3; channel++) {
        int64_t last = 0, before = 0;
        for (int i = 0; i < 256; i++) {
            const int64_t count = counts[0][channel][i] + counts[1][channel][i];
            if (count) last = count;
        }
        const int64_t step = (p->values / 3 - last) / 255;
        for (int i = 0; i < 256; i++) {
            const int64_t value = step ? (step / 2 + before) / step : i;
            tables[channel][i] = (uint8_t)(value < 255 ? value : 255);
            before += counts[0][channel][i] + counts[1][channel][i];
        }
    }
    apply_tables(p->pixels, p->values, tables);
}

static inline uint32_t gray(const uint8_t *pixel) {
    return (pixel[0] * 19595u + pixel[1] * 38470u + pixel[2] * 7471u + 0x8000u) >> 16;
}

FOR_EVERY_PROCESSOR
static void gray_row(const uint8_t *restrict pixels, int64_t side, uint8_t *restrict out) {
    for (int64_t x = 0; x < side; x++) out[x] = (uint8_t)gray(pixels + 3 * x);
}

FOR_EVERY_PROCESSOR
static void repeat_three_times(const uint8_t *restrict gray, int64_t side, uint8_t *restrict out) {
    for (int64_t x = 0; x < side; x++) out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = gray[x];
}

static void color(Picture *p, float factor) {
    for (uint8_t *row = p->pixels; row < p->pixels + p->values; row += p->row) {
        gray_row(row, p->side, p->line);
        repeat_three_times(p->line, p->side, p->copy);
        blend(row, p->row, p->copy, factor);
    }
}

FOR_EVERY_PROCESSOR
static int64_t sum(const uint8_t *values, int64_t count) {
    uint32_t total = 0; /* of one row */
    for (int64_t i = 0; i < count; i++) total += values[i];
    return total;
}

static void contrast(Picture *p, float factor) {
    int64_t total = 0;
    const int64_t count = p->side * p->side;
    for (const uint8_t *row = p->pixels; row < p->pixels + p->values; row += p->row) {
        gray_row(row, p->side, p->line);
        total += sum(p->line, p->side);
    }
    blend_one(p->pixels, p->values, (float)((2 * total + count) / (2 * count)), factor);
}

/* ---------------------------------------------------------------------------------------- sharpness, and Gaussian blur */

/* The mean of 3 x 3 pixels, the middle one five times. */
FOR_EVERY_PROCESSOR
static void smooth_row(const uint8_t *restrict above, const uint8_t *restrict here, const uint8_t *restrict below,
                       int64_t from, int64_t to, uint8_t *restrict out) {
    for (int64_t i = from; i < to; i++) {
        const uint16_t around = (uint16_t)(above[i - 3] + above[i] + above[i + 3] + here[i - 3] + here[i + 3] +
                                           below[i - 3] + below[i] + below[i + 3] + 5 * here[i]);
        out[i] = (uint8_t)((uint16_t)(2 * around + 13) / 26);
    }
}

static void sharpness(Picture *p, float factor) {
    memcpy(p->copy, p->pixels, (size_t)p->values);
    for (int64_t y = 1; y + 1 < p->side; y++) {
        const uint8_t *here = p->copy + y * p->row;
        memcpy(p->line, here, (size_t)p->row); /* the border stays as it is */
        smooth_row(here - p->row, here, here + p->row, 3, p->row - 3, p->line);
        blend(p->pixels + y * p->row, p->row, p->line, factor);
    }
}

/* Boxes whose repetition is nearly a Gaussian: all pixels within `radius` weigh `inner`, the next ones `outer`, in units
 * of 2^-24 (Gwosdek et al., 2011; radius and weights as Pillow rounds them). */
typedef struct {
    int64_t radius;
    uint32_t inner, outer;
} Box;

static Box box_of(float deviation) {
    const float variance = deviation * deviation / PASSES;
    const float length = (float)sqrt(12.0 * (double)variance + 1.0);
    const float whole = (float)floor(((double)length - 1.0) / 2.0);
    float rest = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance);
    rest /= 6 * (variance - (whole + 1) * (whole + 1));
    float radius = whole + rest;
    if (!(radius < MAX_RADIUS)) radius = MAX_RADIUS;
    Box box = {(int64_t)radius, 0, 0};
    box.inner = (uint32_t)((float)(1 << 24) / (radius * 2 + 1));
    box.outer = ((1u << 24) - (uint32_t)(2 * box.radius + 1) * box.inner) / 2;
    return box;
}

FOR_EVERY_PROCESSOR
static void begin_box(uint16_t *restrict sums, const uint8_t *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = values[i];
}

FOR_EVERY_PROCESSOR
static void add_to_box(uint16_t *restrict sums, const uint8_t *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = (uint16_t)(sums[i] + values[i]);
}

FOR_EVERY_PROCESSOR
static void end_box(const uint16_t *restrict sums, const uint8_t *restrict first, const uint8_t *restrict last,
                    const Box *box, int64_t count, uint8_t *restrict out) {
    const uint32_t inner = box->inner, outer = box->outer;
    for (int64_t i = 0; i < count; i++)
        out[i] = (uint8_t)((sums[i] * inner + (uint32_t)(first[i] + last[i]) * outer + (1u << 23)) >> 24);
}

static void blur_row(Picture *p, uint8_t *row, const Box *box) {
    const int64_t reach = box->radius + 1;
    uint8_t *line = p->line + 3 * reach;
    for (int pass = 0; pass < PASSES; pass++) {
        memcpy(line, row, (size_t)p->row);
        for (int64_t i = 1; i <= reach; i++) {
            memcpy(line - 3 * i, row, 3);
            memcpy(line + p->row + 3 * (i - 1), row + p->row - 3, 3);
        }
        begin_box(p->sums, line, p->row);
        for (int64_t i = 1; i <= box->radius; i++) {
            add_to_box(p->sums, line - 3 * i, p->row);
            add_to_box(p->sums, line + 3 * i, p->row);
        }
        end_box(p->sums, line - 3 * reach, line + 3 * reach, box, p->row, row);
    }
}

static const uint8_t *row_at(const uint8_t *pixels, const Picture *p, int64_t y) {
    return pixels + (y < 0 ? 0 : y < p->side ? y : p->side - 1) * p->row;
}

static void blur_down(Picture *p, const uint8_t *pixels, const Box *box, uint8_t *out) {
    const int64_t reach = box->radius + 1;
    for (int64_t y = 0; y < p->side; y++) {
        begin_box(p->sums, row_at(pixels, p, y), p->row);
        for (int64_t i = 1; i <= box->radius; i++) {
            add_to_box(p->sums, row_at(pixels, p, y - i), p->row);
            add_to_box(p->sums, row_at(pixels, p, y + i), p->row);
        }
        end_box(p->sums, row_at(pixels, p, y - reach), row_at(pixels, p, y + reach), box, p->row, out + y * p->row);
    }
}

static void blur(Picture *p, float deviation) {
    const Box box = box_of(deviation);
    for (uint8_t *row = p->pixels; row < p->pixels + p->values; row += p->row) blur_row(p, row, &box);
    uint8_t *from = p->pixels, *to = p->copy;
    for (int pass = 0; pass < PASSES; pass++) {
        blur_down(p, from, &box, to);
        uint8_t *filled = to;
        to = from, from = filled;
    }
    memcpy(p->pixels, p->copy, (size_t)p->values); /* an odd number of passes */
}

enum { WEIGHT_BITS = 12, MOST_WEIGHTS = 5 };

/* Mirrored at the border, whose pixel is not repeated. */
static int64_t mirrored(int64_t at, int64_t side) { return at < 0 ? -at : at < side ? at : 2 * (side - 1) - at; }

FOR_EVERY_PROCESSOR
static void begin_total(uint32_t *restrict totals, const uint32_t *restrict from, uint32_t weight, int64_t count) {
    for (int64_t i = 0; i < count; i++) totals[i] = weight * from[i] + (1u << (2 * WEIGHT_BITS - 1));
}

FOR_EVERY_PROCESSOR
static void add_to_total(uint32_t *restrict totals, const uint32_t *restrict above, const uint32_t *restrict below,
                         uint32_t weight, int64_t count) {
    for (int64_t i = 0; i < count; i++) totals[i] += weight * (above[i] + below[i]);
}

FOR_EVERY_PROCESSOR
static void end_total(const uint32_t *restrict totals, int64_t count, uint8_t *restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(totals[i] >> (2 * WEIGHT_BITS));
}

FOR_EVERY_PROCESSOR
static void across(const uint8_t *restrict line, const uint32_t *restrict weights, int64_t reach, int64_t count,
                   uint32_t *restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = weights[0] * line[i];
    for (int64_t k = 1; k <= reach; k++)
        for (int64_t i = 0; i < count; i++) out[i] += weights[k] * (uint32_t)(line[i - 3 * k] + line[i + 3 * k]);
}

/* A kernel across and then down, in whole numbers below 2^32: rounded once, at the end. */
static void convolve(Picture *p, const Instruction *given) {
    const int64_t reach = (int64_t)given->values[0];
    uint32_t weights[MOST_WEIGHTS];
    for (int64_t k = 0; k <= reach; k++) weights[k] = (uint32_t)given->values[1 + k];
    uint32_t *rows = (uint32_t *)p->floats, *totals = rows + p->values;
    uint8_t *line = p->line + 3 * reach;
    for (int64_t y = 0; y < p->side; y++) {
        const uint8_t *row = p->pixels + y * p->row;
        memcpy(line, row, (size_t)p->row);
        for (int64_t i = 1; i <= reach; i++) {
            memcpy(line - 3 * i, row + 3 * mirrored(-i, p->side), 3);
            memcpy(line + p->row + 3 * (i - 1), row + 3 * mirrored(p->side - 1 + i, p->side), 3);
        }
        across(line, weights, reach, p->row, rows + y * p->row);
    }
    for (int64_t y = 0; y < p->side; y++) {
        begin_total(totals, rows + y * p->row, weights[0], p->row);
        for (int64_t k = 1; k <= reach; k++)
            add_to_total(totals, rows + mirrored(y - k, p->side) * p->row, rows + mirrored(y + k, p->side) * p->row,
                         weights[k], p->row);
        end_total(totals, p->row, p->pixels + y * p->row);
    }
}

/* --------------------------------------------------------------------------------------------------------------- hue */

enum { LANE = 64 }; /* pixels at a time */

/* Hues in 256ths of a turn are turned, with all roundings of Pillow's mode HSV, there and back. Nothing branches, so that
 * a compiler takes several pixels at once. */
FOR_EVERY_PROCESSOR
static void turn(uint8_t *restrict pixels, int count, int shift) {
    int channels[3][LANE], hues[LANE], most[LANE], least[LANE];
    float shares[LANE];
    for (int i = 0; i < count; i++)
        for (int c = 0; c < 3; c++) channels[c][i] = pixels[3 * i + c];
    for (int i = 0; i < count; i++) {
        const int r = channels[0][i], g = channels[1][i], b = channels[2][i];
        const int upper = r > g ? r : g, lower = r < g ? r : g;
        most[i] = upper > b ? upper : b, least[i] = lower < b ? lower : b;
    }
    for (int i = 0; i < count; i++) {
        const int r = channels[0][i], g = channels[1][i], b = channels[2][i], high = most[i], span = high - least[i];
        const float divisor = (float)(span + (span == 0));
        const float red = (float)(high - r) / divisor, green = (float)(high - g) / divisor;
        const float blue = (float)(high - b) / divisor;
        /* The largest channel names the third of a turn; the other two say where in it. */
        const float of_red = blue - green, of_green = (float)(2.0 + (double)red - (double)blue);
        const float of_blue = (float)(4.0 + (double)green - (double)red);
        const int is_red = r == high, is_green = (g == high) & !is_red, is_blue = 1 - is_red - is_green;
        const float sixths = (float)is_red * of_red + (float)is_green * of_green + (float)is_blue * of_blue;
        const double place = (double)sixths / 6.0 + 1.0;
        const float hue = (float)(place - (double)(place >= 1.0));
        const int saturation = (int)((double)((float)span / (float)(high + (high == 0))) * 255.0);
        hues[i] = ((int)((double)hue * 255.0) + shift) & 255;
        shares[i] = (float)((double)saturation / 255.0);
    }
    for (int i = 0; i < count; i++) {
        const double in_sixths = (double)((float)hues[i] * 6.0f) / 255.0, value = (double)most[i];
        const int whole = (int)in_sixths, sixth = whole == 6 ? 0 : whole, high = most[i];
        const float rest = (float)(in_sixths - (double)whole);
        const int low = (int)(value * (1.0 - (double)shares[i]) + 0.5);
        const int falling = (int)(value * (1.0 - (double)(shares[i] * rest)) + 0.5);
        const int rising = (int)(value * (1.0 - (double)shares[i] * (1.0 - (double)rest)) + 0.5);
        const int is_early = sixth < 3; /* of red 0 1 2 3 4 5 is high, falling, low, low, rising, high; and so on */
        channels[0][i] = is_early ? (sixth == 0 ? high : sixth == 1 ? falling : low)
                                  : (sixth == 3 ? low : sixth == 4 ? rising : high);
        channels[1][i] = is_early ? (sixth == 0 ? rising : high) : (sixth == 3 ? falling : low);
        channels[2][i] = is_early ? (sixth == 2 ? rising : low) : (sixth == 5 ? falling : high);
    }
    for (int i = 0; i < count; i++)
        for (int c = 0; c < 3; c++) pixels[3 * i + c] = (uint8_t)channels[c][i];
}

static void turn_hues(Picture *p, int shift) {
    for (int64_t i = 0; i < p->values; i += 3 * LANE) {
        const int64_t left = (p->values - i) / 3;
        turn(p->pixels + i, left < LANE ? (int)left : LANE, shift);
    }
}

/* ---------------------------------------------------------------------------------------------------------- geometry */

static void fill_pixels(uint8_t *out, int64_t count, const int32_t fill[3]) {
    for (int64_t i = 0; i < count; i++, out += 3)
        out[0] = (uint8_t)fill[0], out[1] = (uint8_t)fill[1], out[2] = (uint8_t)fill[2];
}

static int64_t within(double value, int64_t side) {
    return value > 0 ? (value < (double)side ? (int64_t)value : side) : 0;
}

static void cutout(Picture *p, const Instruction *given) {
    const int64_t top = within(given->values[0], p->side), left = within(given->values[1], p->side);
    const int64_t bottom = within(given->values[2], p->side), right = within(given->values[3], p->side);
    for (int64_t y = top; y < bottom; y++) fill_pixels(p->pixels + y * p->row + 3 * left, right - left, given->fill);
}

/* In units of 2^-16 pixels, as Pillow rounds. */
static int64_t fixed(double value) { return (int64_t)floor(value * 65536.0 + 0.5); }

static void affine_nearest(Picture *p, const Instruction *given) {
    const double *a = given->values;
    memcpy(p->copy, p->pixels, (size_t)p->values);
    fill_pixels(p->pixels, p->side * p->side, given->fill);
    if (a[1] == 0 && a[3] == 0) { /* Pillow goes by steps of a double there */
        double row = a[5] + a[4] * 0.5;
        for (int64_t y = 0; y < p->side; y++, row += a[4]) {
            if (!(row >= 0 && row < (double)p->side)) continue;
            const uint8_t *source = p->copy + (int64_t)row * p->row;
            double column = a[2] + a[0] * 0.5;
            for (int64_t x = 0; x < p->side; x++, column += a[0])
                if (column >= 0 && column < (double)p->side)
                    memcpy(p->pixels + y * p->row + 3 * x, source + 3 * (int64_t)column, 3);
        }
        return;
    }
    int64_t first_column = fixed(a[2] + a[0] * 0.5 + a[1] * 0.5), first_row = fixed(a[5] + a[3] * 0.5 + a[4] * 0.5);
    const int64_t right[2] = {fixed(a[0]), fixed(a[3])}, down[2] = {fixed(a[1]), fixed(a[4])};
    const int64_t end = p->side * 65536;
    for (int64_t y = 0; y < p->side; y++, first_column += down[0], first_row += down[1]) {
        int64_t column = first_column, row = first_row;
        uint8_t *out = p->pixels + y * p->row;
        for (int64_t x = 0; x < p->side; x++, out += 3, column += right[0], row += right[1])
            if (column >= 0 && column < end && row >= 0 && row < end)
                memcpy(out, p->copy + (row >> 16) * p->row + 3 * (column >> 16), 3);
    }
}

static void weights_of(Weights *table, int interpolation) {
    for (int i = 0; i < STEPS; i++) {
        const double d = (double)i / STEPS;
        double weights[4] = {0, 1, d, 0};
        if (interpolation == BICUBIC) {
            weights[0] = -d + 2 * d * d - d * d * d;
            weights[2] = d + d * d - d * d * d;
            weights[3] = -d * d + d * d * d;
        }
        for (int k = 0; k < 4; k++)
            if (k != 1) {
                weights[k] = floor(weights[k] * 16384 + 0.5) / 16384;
                weights[1] -= weights[k];
            }
        for (int k = 0; k < 4; k++) table[i].of[k] = (float)weights[k];
    }
}

/* Two of four where the others weigh nothing. */
FOR_EVERY_PROCESSOR
static void mix_two(const float *const from[4], const Weights *weights, int64_t count, uint8_t *restrict out) {
    const float *one = from[1], *other = from[2];
    const float a = weights->of[1], b = weights->of[2];
    for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(int32_t)(a * one[i] + b * other[i]);
}

FOR_EVERY_PROCESSOR
static void mix_four(const float *const from[4], const Weights *weights, int64_t count, uint8_t *restrict out) {
    const float *p = from[0], *q = from[1], *r = from[2], *s = from[3];
    const float a = weights->of[0], b = weights->of[1], c = weights->of[2], d = weights->of[3];
    for (int64_t i = 0; i < count; i++) {
        const float value = a * p[i] + b * q[i] + c * r[i] + d * s[i];
        out[i] = (uint8_t)(int32_t)(value > 0.0f ? (value < 255.0f ? value : 255.0f) : 0.0f);
    }
}

/* Where Pillow looks for output pixel x: a x + (b y) + c, at the pixels' middles. */
static inline double place(double a, int64_t x, double rest, double c) { return a * ((double)x + 0.5) + rest + c; }

static inline int is_inside(double place, int64_t side) { return place >= 0.0 && place < (double)side; }

/* In units of 1 / STEPS, from the middle of the first pixel on; -STEPS / 2 at least. Of a place that is inside. */
static inline int32_t in_steps(double place) { return (int32_t)((place + 0.5) * STEPS + 0.5) - STEPS; }

/* In units of 2^-32 pixels. */
static inline int64_t in_fractions(double value) { return (int64_t)floor(value * 0x1p32 + 0.5); }

enum { HALF_A_STEP = 1 << 21 };

/* First and end of the output pixels that show `place(1, x, rest, c)` inside. */
static void inside(int64_t side, double rest, double c, int64_t *first, int64_t *end) {
    int64_t x = within(-(rest + c), side);
    while (x > 0 && place(1.0, x - 1, rest, c) >= 0.0) x--;
    while (x < side && !(place(1.0, x, rest, c) >= 0.0)) x++;
    *first = x;
    x = within((double)side - (rest + c), side);
    while (x < side && place(1.0, x, rest, c) < (double)side) x++;
    while (x > *first && !(place(1.0, x - 1, rest, c) < (double)side)) x--;
    *end = x;
}

typedef void Mix(const float *const[4], const Weights *, int64_t, uint8_t *restrict);

/* Each row is moved as a whole, to the left or right. `middle`: of the copy, its first pixel. */
static void move_rows(Picture *p, const Instruction *given, const float *middle, int64_t stride, const Weights *table) {
    Mix *mix = given->interpolation == BICUBIC ? mix_four : mix_two;
    for (int64_t y = 0; y < p->side; y++) {
        const double rest = given->values[1] * ((double)y + 0.5);
        uint8_t *out = p->pixels + y * p->row;
        int64_t first, end;
        inside(p->side, rest, given->values[2], &first, &end);
        fill_pixels(out, first, given->fill);
        fill_pixels(out + 3 * end, p->side - end, given->fill);
        if (first >= end) continue;
        const int32_t at = in_steps(place(1.0, first, rest, given->values[2]));
        const float *source = middle + y * stride + 3 * (int64_t)(at >> 10);
        const float *const from[4] = {source - 3, source, source + 3, source + 6};
        mix(from, table + (at & (STEPS - 1)), 3 * (end - first), out + 3 * first);
    }
}

/* All columns are moved alike, up or down. */
static void move_columns(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                         const Weights *table) {
    Mix *mix = given->interpolation == BICUBIC ? mix_four : mix_two;
    for (int64_t y = 0; y < p->side; y++) {
        const double source_row = place(given->values[4], y, 0.0, given->values[5]);
        uint8_t *out = p->pixels + y * p->row;
        if (!is_inside(source_row, p->side)) {
            fill_pixels(out, p->side, given->fill);
            continue;
        }
        const int32_t at = in_steps(source_row);
        const float *source = middle + (int64_t)(at >> 10) * stride;
        const float *const from[4] = {source - stride, source, source + stride, source + 2 * stride};
        mix(from, table + (at & (STEPS - 1)), p->row, out);
    }
}

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* into each version that FOR_EVERY_PROCESSOR makes */

typedef float Pixel __attribute__((vector_size(16)));

static ALWAYS_INLINE Pixel pixel_at(const float *values) { /* and the next one's first value, which does not matter */
    Pixel pixel;
    memcpy(&pixel, values, sizeof pixel);
    return pixel;
}

typedef int32_t Whole __attribute__((vector_size(16)));

static ALWAYS_INLINE void put(uint8_t *out, Pixel total) {
    const Pixel white = {255, 255, 255, 255};
    const Whole above_zero = total > 0.0f, below_white = total < white;
    const Whole clipped = ((Whole)total & above_zero & below_white) | ((Whole)white & ~below_white);
    const Whole values = __builtin_convertvector((Pixel)clipped, Whole);
    out[0] = (uint8_t)values[0], out[1] = (uint8_t)values[1], out[2] = (uint8_t)values[2];
}

/* Each column is moved as a whole, up or down. */
static ALWAYS_INLINE void shift_columns(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                                        const Weights *table, Column *columns, int first_weight, int end_weight) {
    for (int64_t x = 0; x < p->side; x++) {
        const double rest = given->values[3] * ((double)x + 0.5);
        Column *column = columns + x;
        inside(p->side, rest, given->values[5], &column->first, &column->end);
        if (column->first >= column->end) continue; /* its place may be any, and need not fit into 32 bits */
        const int32_t at = in_steps(place(1.0, column->first, rest, given->values[5]));
        column->weights = table + (at & (STEPS - 1));
        column->offset = ((at >> 10) - column->first) * stride + 3 * x;
    }
    for (int64_t y = 0; y < p->side; y++) {
        uint8_t *out = p->pixels + y * p->row;
        const float *row = middle + y * stride;
        for (int64_t x = 0; x < p->side; x++, out += 3) {
            const Column *column = columns + x;
            if (y < column->first || y >= column->end) {
                fill_pixels(out, 1, given->fill);
                continue;
            }
            const float *source = row + column->offset;
            Pixel total = {0, 0, 0, 0};
            for (int k = first_weight; k < end_weight; k++)
                total += column->weights->of[k] * pixel_at(source + (k - 1) * stride);
            put(out, total);
        }
    }
}

FOR_EVERY_PROCESSOR
static void shift_columns_bilinear(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                                   const Weights *table, Column *columns) {
    shift_columns(p, given, middle, stride, table, columns, 1, 3);
}

FOR_EVERY_PROCESSOR
static void shift_columns_bicubic(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                                  const Weights *table, Column *columns) {
    shift_columns(p, given, middle, stride, table, columns, 0, 4);
}

/* Any transform, pixel by pixel: of four weights in each direction, those from `first_weight` on. */
static ALWAYS_INLINE void move_pixels(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                                      const Weights *table, int first_weight, int end_weight) {
    const double *a = given->values;
    const int64_t right = in_fractions(a[0]), down = in_fractions(a[3]);
    for (int64_t y = 0; y < p->side; y++) {
        uint8_t *out = p->pixels + y * p->row;
        const double column_rest = a[1] * ((double)y + 0.5), row_rest = a[4] * ((double)y + 0.5);
        int64_t first = 0, end = p->side; /* what lies inside is a stretch of the row */
        for (; first < end; first++)
            if (is_inside(place(a[0], first, column_rest, a[2]), p->side) &&
                is_inside(place(a[3], first, row_rest, a[5]), p->side))
                break;
        for (; end > first; end--)
            if (is_inside(place(a[0], end - 1, column_rest, a[2]), p->side) &&
                is_inside(place(a[3], end - 1, row_rest, a[5]), p->side))
                break;
        fill_pixels(out, first, given->fill);
        fill_pixels(out + 3 * end, p->side - end, given->fill);
        int64_t column = in_fractions(place(a[0], first, column_rest, a[2]) + 0.5) + HALF_A_STEP;
        int64_t row = in_fractions(place(a[3], first, row_rest, a[5]) + 0.5) + HALF_A_STEP;
        out += 3 * first;
        for (int64_t x = first; x < end; x++, out += 3, column += right, row += down) {
            const float *wide = table[column >> 22 & (STEPS - 1)].of, *high = table[row >> 22 & (STEPS - 1)].of;
            const float *source = middle + ((row >> 32) - 1) * stride + 3 * ((column >> 32) - 1);
            Pixel total = {0, 0, 0, 0};
            for (int k = first_weight; k < end_weight; k++) {
                const float *from = source + (k - 1) * stride;
                Pixel mixed = {0, 0, 0, 0};
                for (int i = first_weight; i < end_weight; i++) mixed += wide[i] * pixel_at(from + 3 * (i - 1));
                total += high[k] * mixed;
            }
            put(out, total);
        }
    }
}

FOR_EVERY_PROCESSOR
static void move_pixels_bilinear(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                                 const Weights *table) {
    move_pixels(p, given, middle, stride, table, 1, 3);
}

FOR_EVERY_PROCESSOR
static void move_pixels_bicubic(Picture *p, const Instruction *given, const float *middle, int64_t stride,
                                const Weights *table) {
    move_pixels(p, given, middle, stride, table, 0, 4);
}

FOR_EVERY_PROCESSOR
static void to_floats(const uint8_t *restrict values, int64_t count, float *restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = (float)values[i];
}

static void affine(Picture *p, const Instruction *given) {
    const double *a = given->values;
    const int is_cubic = given->interpolation == BICUBIC;
    if (given->interpolation == NEAREST) {
        affine_nearest(p, given);
        return;
    }
    /* The copy goes on beyond its borders as its outermost pixels do. */
    const int64_t stride = p->row + 2 * 3 * MARGIN;
    const size_t pixel = 3 * sizeof(float), bytes = (size_t)stride * sizeof(float);
    float *first = p->floats, *middle = first + MARGIN * stride + 3 * MARGIN;
    for (int64_t y = 0; y < p->side; y++) {
        float *row = middle + y * stride;
        to_floats(p->pixels + y * p->row, p->row, row);
        for (int64_t i = 1; i <= MARGIN; i++) {
            memcpy(row - 3 * i, row, pixel);
            memcpy(row + p->row + 3 * (i - 1), row + p->row - 3, pixel);
        }
    }
    for (int64_t i = 0; i < MARGIN; i++) {
        memcpy(first + i * stride, first + MARGIN * stride, bytes);
        memcpy(first + (MARGIN + p->side + i) * stride, first + (MARGIN + p->side - 1) * stride, bytes);
    }
    Weights table[STEPS];
    weights_of(table, given->interpolation);
    const int columns_stay = a[0] == 1 && a[1] == 0 && a[2] == 0, rows_stay = a[3] == 0 && a[4] == 1 && a[5] == 0;
    if (rows_stay && a[0] == 1)
        move_rows(p, given, middle, stride, table);
    else if (columns_stay && a[3] == 0)
        move_columns(p, given, middle, stride, table);
    else if (columns_stay && a[4] == 1)
        (is_cubic ? shift_columns_bicubic : shift_columns_bilinear)(p, given, middle, stride, table, p->columns);
    else
        (is_cubic ? move_pixels_bicubic : move_pixels_bilinear)(p, given, middle, stride, table);
}

/* -------------------------------------------------------------------------------------------------------- the programs */

static void perform(Picture *p, const Instruction *given) {
    const double value = given->values[0];
    switch (given->code) {
        case INVERT: solarize(p->pixels, p->values, 0); break;
        case SOLARIZE: if (value < 256) solarize(p->pixels, p->values, (uint8_t)value); break;
        case SOLARIZE_ADD: solarize_add(p->pixels, p->values, (uint8_t)(value < 255 ? value : 255)); break;
        case POSTERIZE: keep_bits(p->pixels, p->values, (uint8_t)(0xFF << (8 - (value < 8 ? (int)value : 8)))); break;
        case AUTOCONTRAST: autocontrast(p); break;
        case EQUALIZE: equalize(p); break;
        case COLOR: color(p, (float)value); break;
        case CONTRAST: contrast(p, (float)value); break;
        case BRIGHTNESS: blend_one(p->pixels, p->values, (float)given->values[1], (float)value); break;
        case SHARPNESS: sharpness(p, (float)value); break;
        case AFFINE: affine(p, given); break;
        case CUTOUT: cutout(p, given); break;
        case BLUR: blur(p, (float)value); break;
        case HUE: turn_hues(p, (int)value & 255); break;
        case KERNEL: convolve(p, given); break;
        default: break;
    }
}

/* Whether a kernel lies within a picture once mirrored, and weighs no more than one. */
static int is_kernel(const Instruction *given, int64_t side) {
    const double reach = given->values[0];
    if (!(reach >= 0 && reach < MOST_WEIGHTS && reach < (double)side)) return 0;
    int64_t sum = 0;
    for (int64_t k = 0; k <= (int64_t)reach; k++) {
        if (!(given->values[1 + k] >= 0)) return 0;
        sum += (k ? 2 : 1) * (int64_t)given->values[1 + k];
    }
    return sum <= 1 << WEIGHT_BITS;
}

/* Whether whatever is computed from an instruction fits into its type. */
static int is_sound(const Instruction *given, int64_t side) {
    for (int k = 0; k < 6; k++)
        if (!(fabs(given->values[k]) < 32768)) return 0; /* NaN, too */
    if (given->code == KERNEL && !is_kernel(given, side)) return 0;
    return given->code >= NOTHING && given->code <= KERNEL && given->interpolation >= NEAREST &&
           given->interpolation <= BICUBIC && (given->code > POSTERIZE || given->values[0] >= 0);
}

/* `images.operate` says what the arguments are. Returns OK; NO_MEMORY; REFUSED, with nothing changed, for others. */
int vitscale_operate(uint8_t *images, int64_t count, int64_t side, const Instruction *programs, int64_t length,
                     const int32_t *status) {
    if (side < 1 || side > MAX_SIDE) return REFUSED;
    for (int64_t i = 0; i < count * length; i++)
        if (!is_sound(programs + i, side)) return REFUSED;
    const int64_t wide = side + 2 * MARGIN, line = 3 * (side + 2 * (MAX_RADIUS + 1));
    const int64_t columns = side * (int64_t)sizeof(Column), floats = (3 * wide * wide + 8) * (int64_t)sizeof(float);
    const int64_t sums = 3 * side * (int64_t)sizeof(uint16_t);
    char *memory = malloc((size_t)(columns + floats + sums + line)); /* in the order of alignment */
    if (!memory) return NO_MEMORY;
    Picture picture = {.pixels = images, .side = side, .row = 3 * side, .values = 3 * side * side};
    picture.columns = (Column *)memory;
    picture.floats = (float *)(memory + columns);
    picture.copy = (uint8_t *)picture.floats;
    picture.sums = (uint16_t *)(memory + columns + floats);
    picture.line = (uint8_t *)(memory + columns + floats + sums);
    for (int64_t b = 0; b < count; b++, programs += length, picture.pixels += picture.values)
        for (int64_t i = 0; i < length && status[b] == OK; i++) perform(&picture, programs + i);
    free(memory);
    return OK;
}
