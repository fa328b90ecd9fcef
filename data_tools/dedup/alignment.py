"""Are two pictures the same? Their correlation, once the part of one that the other shows has been found.

A hash that is near says that one picture may be a crop of the other, and roughly which. From there, the window in the
test image is moved, scaled and turned a little until the query fits best (Gauss-Newton on the squared difference, with
brightness and contrast free; Baker and Matthews, "Lucas-Kanade 20 Years On", 2004). Copies then correlate above 0.95
where without this a crop that is 2 % off reaches 0.8, as do two different shirts on a white ground.
"""

import numpy as np
from numba import njit

from data_tools.dedup.luma import SIDE
from data_tools.dedup.variants import Window

_GRID = 32  # pixels a side that are compared
_STEPS = 8
_FARTHEST = 8.0  # pixels of 64 that the window may move, or its sides turn
_STRETCH = 1.25
_ENOUGH = 1e-4  # a gain in correlation that is not worth another step


def correlation(query: np.ndarray, image: np.ndarray, window: Window, mirrored: bool) -> float:
    """How well a query fits a window of a test image, or one near it.

    Args:
        query, image: uint8 (64, 64), lumas of the whole pictures.
        window: the part of the image that the query is thought to show.
        mirrored: whether the query shows it mirrored.

    Returns Pearson's correlation of the pixels, -1 to 1; 0 for a picture without any contrast. Three decimals: further
    ones may differ between processors.
    """
    width = -window.width if mirrored else window.width
    start = np.array(
        [
            *((window.top + window.height / 2) * SIDE - 0.5, 0.0, window.height * SIDE),
            *((window.left + window.width / 2) * SIDE - 0.5, width * SIDE, 0.0),
        ],
        np.float32,
    )
    return round(float(_aligned(_halved(query), image.astype(np.float32), start)), 3)


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


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _warp(image, window, value, down, across):
    """The image and its gradients where the window's 32 x 32 pixels are, bilinearly, flat into three arrays."""
    last = np.float32(SIDE - 1.001)
    zero, one = np.float32(0), np.float32(1)
    step = np.float32(1.0 / _GRID)
    i = 0
    for row in range(_GRID):
        v = (np.float32(row) + np.float32(0.5)) * step - np.float32(0.5)
        for column in range(_GRID):
            u = (np.float32(column) + np.float32(0.5)) * step - np.float32(0.5)
            y = min(max(window[0] + window[1] * u + window[2] * v, zero), last)
            x = min(max(window[3] + window[4] * u + window[5] * v, zero), last)
            top, left = np.int32(y), np.int32(x)
            fy, fx = y - np.float32(top), x - np.float32(left)
            a, b = image[top, left], image[top, left + 1]
            c, d = image[top + 1, left], image[top + 1, left + 1]
            upper, lower = a + (b - a) * fx, c + (d - c) * fx
            value[i] = upper + (lower - upper) * fy
            down[i] = lower - upper
            across[i] = (b - a) * (one - fy) + (d - c) * fy
            i += 1


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _correlate(a, b):
    count = np.float32(a.size)
    mean_a, mean_b = np.float32(0), np.float32(0)
    for i in range(a.size):
        mean_a += a[i]
        mean_b += b[i]
    mean_a /= count
    mean_b /= count
    aa, bb, ab = np.float32(0), np.float32(0), np.float32(0)
    for i in range(a.size):
        da, db = a[i] - mean_a, b[i] - mean_b
        aa += da * da
        bb += db * db
        ab += da * db
    if aa < np.float32(1e-3) * count or bb < np.float32(1e-3) * count:
        return np.float32(0)
    return ab / np.sqrt(aa * bb)


@njit(nogil=True, cache=True, error_model="numpy")
def _aligned(query, image, start):
    """The best correlation on the way from a window: y, its change by u and v, the same of x; u, v in [-1/2, 1/2]."""
    size = _GRID * _GRID
    target = query.copy().reshape(size)
    value, down, across = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    columns = np.empty((8, size), np.float32)
    for i in range(size):
        columns[7, i] = 1
    window = start.copy()
    _warp(image, window, value, down, across)
    best = _correlate(target, value)
    for _ in range(_STEPS):
        change = _step(target, value, down, across, columns)
        gain = change[6]
        if not gain > 0.05:  # the picture would have to be inverted, or there is no solution
            break
        moved = window.copy()
        for i in range(6):
            moved[i] += np.float32(change[i] / gain)
        if not _is_near(moved, start):
            break
        _warp(image, moved, value, down, across)
        reached = _correlate(target, value)
        if not reached > best + _ENOUGH:
            best = max(best, reached)
            break
        best, window = reached, moved
    return best


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _step(target, value, down, across, columns):
    """Least squares: by how much to change the window's six numbers, and brightness and contrast with them; (8,)."""
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
    """Of a positive definite system, by Cholesky; zeros where it is none."""
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
