/* Random boxes as TensorFlow's `sample_distorted_bounding_box` draws them; `data.augmentation.inception_crop` says how.
 *
 * Doubles, one operation after the other (-ffp-contract=off): every processor draws the same box. */
#include <math.h>
#include <stdint.h>

enum { ATTEMPTS = 100 };

/* Uniform in [0, 1): draw number `counter` of the sample with this key. */
static double draw(uint64_t key, uint64_t counter) {
    uint64_t z = key + (counter + 1) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z = z ^ (z >> 31);
    return (double)(z >> 11) * 0x1p-53;
}

static int64_t rounded(double value) { return (int64_t)rint(value); }

/* keys, heights, widths (count,) -> boxes (count, 4): top, left, height, width. */
void vitscale_inception_crop(int64_t count, const uint64_t *keys, const int64_t *heights, const int64_t *widths,
                             double min_area, double max_area, double min_aspect, double max_aspect, int32_t *boxes) {
    for (int64_t b = 0; b < count; b++, boxes += 4) {
        const int64_t height = heights[b], width = widths[b];
        const double low = min_area * (double)height * (double)width, high = max_area * (double)height * (double)width;
        boxes[0] = boxes[1] = 0, boxes[2] = (int32_t)height, boxes[3] = (int32_t)width;
        for (uint64_t counter = 0; counter < 4 * ATTEMPTS; counter += 4) {
            const double aspect = min_aspect + (max_aspect - min_aspect) * draw(keys[b], counter);
            int64_t shortest = rounded(sqrt(low / aspect)), tallest = rounded(sqrt(high / aspect));
            if (tallest > height) tallest = height;
            while (tallest > 0 && rounded((double)tallest * aspect) > width) tallest--;
            if (shortest > tallest) shortest = tallest;
            int64_t h = shortest + (int64_t)(draw(keys[b], counter + 1) * (double)(tallest - shortest + 1));
            int64_t w = rounded((double)h * aspect);
            /* Rounding to whole pixels can leave the range by a row. */
            if ((double)(h * w) < low)
                h++, w = rounded((double)h * aspect);
            else if ((double)(h * w) > high)
                h--, w = rounded((double)h * aspect);
            const double area = (double)(h * w);
            if (h < 1 || w < 1 || h > height || w > width || area < low || area > high) continue;
            boxes[0] = (int32_t)(draw(keys[b], counter + 2) * (double)(height - h + 1));
            boxes[1] = (int32_t)(draw(keys[b], counter + 3) * (double)(width - w + 1));
            boxes[2] = (int32_t)h, boxes[3] = (int32_t)w;
            break;
        }
    }
}
