"""Correlation of two pictures, after finding the part of one that the other shows.

Near hashes say that one picture may be a crop of the other, and roughly which crop. From there, the window in the test
image is moved, scaled and turned a little until the query fits best (Gauss-Newton on the squared difference, with
brightness and contrast free; Baker and Matthews, "Lucas-Kanade 20 Years On", 2004). Copies then correlate above 0.95.
Without this, a crop that is 2 % off reaches 0.8, and so do two different shirts on a white ground.

Uniform borders are left out: two pale pictures in one kind of frame correlate by their frames.
"""

import numpy as np
from numba import njit

from data_tools.dedup.luma import SIDE, Window

_GRID = 32  # pixels per side that are compared
_STEPS = 8
_FARTHEST = 8.0  # pixels of 64: the limit for moving the window or turning its sides
_STRETCH = 1.25
_ENOUGH = 1e-4  # smallest gain in correlation that is worth another step
_MARGIN = 1.0  # pixels of 64 beside a border that are left out too, because it bleeds into them
_LEAST = 0.1  # smallest share of the pixels that must remain without borders


def correlation(
    query: np.ndarray,
    image: np.ndarray,
    window: Window,
    *,
    mirrored: bool,
    inside_query: Window | None = None,
    inside_image: Window | None = None,
) -> float:
    """The correlation of a query with a window of a test image, or with the best-fitting window near it.

    Args:
        query, image: uint8 (64, 64), lumas of the whole pictures.
        window: the part of the image that the query is thought to show.
        mirrored: whether the query shows it mirrored.
        inside_query, inside_image: the part of each picture within its borders; None if it has no border.

    Returns Pearson's correlation of the pixels, -1 to 1, three decimals; 0 where there is no contrast, or hardly
    anything but border.
    """
    width = -window.width if mirrored else window.width
    start = np.array(
        [
            *((window.top + window.height / 2) * SIDE - 0.5, 0.0, window.height * SIDE),
            *((window.left + window.width / 2) * SIDE - 0.5, width * SIDE, 0.0),
        ],
        np.float32,
    )
    seen = _pixels(inside_query, _GRID) if inside_query is not None else _ALL
    box = _pixels(inside_image, SIDE) if inside_image is not None else _ALL
    return round(float(_aligned(_halved(query), image.astype(np.float32), start, seen, box)), 3)


_ALL = np.array([-np.inf, -np.inf, np.inf, np.inf], np.float32)


def _pixels(inside: Window, side: int) -> np.ndarray:
    """float32 (4,): the pixel positions that enclose the part within the borders: top, left, bottom, right."""
    margin = _MARGIN * side / SIDE
    top, left = inside.top * side, inside.left * side
    bottom, right = top + inside.height * side, left + inside.width * side
    # A picture's own edge needs no margin.
    return np.array(
        [
            top + margin - 0.5 if inside.top > 0 else -np.inf,
            left + margin - 0.5 if inside.left > 0 else -np.inf,
            bottom - margin - 0.5 if bottom < side else np.inf,
            right - margin - 0.5 if right < side else np.inf,
        ],
        np.float32,
    )


@njit(nogil=True, cache=True)
def _halved(luma):
    """float32 (32, 32): means of 2 x 2 pixels."""
    out = np.empty((_GRID, _GRID), np.float32)
    for y in range(_GRID):
        for x in range(_GRID):
            total = np.float32(luma[2 * y, 2 * x]) + np.float32(luma[2 * y, 2 * x + 1])
            total += np.float32(luma[2 * y + 1, 2 * x]) + np.float32(luma[2 * y + 1, 2 * x + 1])
            out[y, x] = total * np.float32(0.25)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _warp(image, window, seen, box, value, down, across, weight):
    """The image and its gradients where the window's 32 x 32 pixels are, bilinearly, flat into three arrays.

    `weight` is 1 for pixels that are border neither of the query (those in `seen`) nor of the image (in `box`).
    """
    last = np.float32(SIDE - 1.001)
    zero, one = np.float32(0), np.float32(1)
    step = np.float32(1.0 / _GRID)
    i = 0
    for row in range(_GRID):
        v = (np.float32(row) + np.float32(0.5)) * step - np.float32(0.5)
        for column in range(_GRID):
            u = (np.float32(column) + np.float32(0.5)) * step - np.float32(0.5)
            y = window[0] + window[1] * u + window[2] * v
            x = window[3] + window[4] * u + window[5] * v
            is_inside = seen[0] <= row <= seen[2] and seen[1] <= column <= seen[3]
            is_inside = is_inside and box[0] <= y <= box[2] and box[1] <= x <= box[3]
            weight[i] = one if is_inside else zero
            y, x = min(max(y, zero), last), min(max(x, zero), last)
            top, left = np.int32(y), np.int32(x)
            fy, fx = y - np.float32(top), x - np.float32(left)
            a, b = image[top, left], image[top, left + 1]
            c, d = image[top + 1, left], image[top + 1, left + 1]
            upper, lower = a + (b - a) * fx, c + (d - c) * fx
            value[i] = upper + (lower - upper) * fy
            down[i] = lower - upper
            across[i] = (b - a) * (one - fy) + (d - c) * fy
            i += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _correlate(a, b, weight):
    """Pearson's correlation of the pixels with weight 1; 0 if there are too few, or no contrast."""
    count, mean_a, mean_b = np.float32(0), np.float32(0), np.float32(0)
    for i in range(a.size):
        count += weight[i]
        mean_a += weight[i] * a[i]
        mean_b += weight[i] * b[i]
    if count < np.float32(_LEAST * a.size):
        return np.float32(0)
    mean_a /= count
    mean_b /= count
    aa, bb, ab = np.float32(0), np.float32(0), np.float32(0)
    for i in range(a.size):
        da, db = weight[i] * (a[i] - mean_a), weight[i] * (b[i] - mean_b)
        aa += da * da
        bb += db * db
        ab += da * db
    if aa < np.float32(1e-3) * count or bb < np.float32(1e-3) * count:
        return np.float32(0)
    return ab / np.sqrt(aa * bb)


@njit(nogil=True, cache=True, error_model="numpy")
def _aligned(query, image, start, seen, box):
    """The best correlation found from a window: y, its change by u and v, the same for x; u, v in [-1/2, 1/2]."""
    size = _GRID * _GRID
    target = query.copy().reshape(size)
    value, down, across = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    columns, weight = np.empty((8, size), np.float32), np.empty(size, np.float32)
    window = start.copy()
    _warp(image, window, seen, box, value, down, across, weight)
    best = _correlate(target, value, weight)
    for _ in range(_STEPS):
        change = _step(target, value, down, across, weight, columns)
        gain = change[6]
        if not gain > 0.05:  # the picture would have to be inverted, or there is no solution
            break
        moved = window.copy()
        for i in range(6):
            moved[i] += np.float32(change[i] / gain)
        if not _is_near(moved, start):
            break
        _warp(image, moved, seen, box, value, down, across, weight)
        reached = _correlate(target, value, weight)
        if not reached > best + _ENOUGH:
            best = max(best, reached)
            break
        best, window = reached, moved
    return best


@njit(nogil=True, cache=True, error_model="numpy")
def _step(target, value, down, across, weight, columns):
    """Least-squares step: changes of the window's six numbers, then contrast and brightness; (8,)."""
    step = np.float32(1.0 / _GRID)
    for i in range(target.size):
        u = (np.float32(i % _GRID) + np.float32(0.5)) * step - np.float32(0.5)
        v = (np.float32(i // _GRID) + np.float32(0.5)) * step - np.float32(0.5)
        columns[0, i] = down[i]
        columns[1, i] = down[i] * u
        columns[2, i] = down[i] * v
        columns[3, i] = across[i]
        columns[4, i] = across[i] * u
        columns[5, i] = across[i] * v
        columns[6, i] = value[i]
        columns[7, i] = 1
        for k in range(8):
            columns[k, i] *= weight[i]
    matrix, right = np.empty((8, 8), np.float64), np.empty(8, np.float64)
    for row in range(8):
        total = np.float32(0)
        for i in range(target.size):
            total += columns[row, i] * target[i]
        right[row] = total
        for column in range(row + 1):
            total = np.float32(0)
            for i in range(target.size):
                total += columns[row, i] * columns[column, i]
            matrix[row, column] = matrix[column, row] = total
        matrix[row, row] = matrix[row, row] * (1 + 1e-6) + 1e-6
    return _solved(matrix, right)


@njit(nogil=True, cache=True, error_model="numpy")
def _solved(matrix, right):
    """Solve a positive definite system by Cholesky; zeros if the matrix is not positive definite."""
    size = len(right)
    lower = np.zeros((size, size))
    for row in range(size):
        for column in range(row + 1):
            total = matrix[row, column]
            for k in range(column):
                total -= lower[row, k] * lower[column, k]
            if row == column:
                if not total > 0:
                    return np.zeros(size)
                lower[row, row] = np.sqrt(total)
            else:
                lower[row, column] = total / lower[column, column]
    solution = np.zeros(size)
    for row in range(size):
        total = right[row]
        for k in range(row):
            total -= lower[row, k] * solution[k]
        solution[row] = total / lower[row, row]
    for row in range(size - 1, -1, -1):
        total = solution[row]
        for k in range(row + 1, size):
            total -= lower[k, row] * solution[k]
        solution[row] = total / lower[row, row]
    return solution


@njit(nogil=True, cache=True, error_model="numpy")
def _is_near(window, start):
    for i in (0, 1, 3, 5):
        if not abs(window[i] - start[i]) < _FARTHEST:
            return False
    stretched = window[2] / start[2], window[4] / start[4]
    return min(stretched) > 1 / _STRETCH and max(stretched) < _STRETCH
