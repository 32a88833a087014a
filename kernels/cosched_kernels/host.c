/* Groups and plans in C: what `groups.py` and `plan.py` do with arrays, in microseconds.
 *
 * Compiled by Triton's own builder (`host.py`). The functions of the same names in Python are the
 * reference: a test compares every number. All arrays are contiguous int64 unless said otherwise,
 * and results are bytearrays.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NUM_FIELDS 8 /* of an item: first token, tokens, request, KV begin, end, limit, piece, 0 */
#define UNLIMITED (1 << 30)
#define ONLY (-1)
#define MAX_HEIGHTS 16

typedef struct {
    Py_buffer view;
    const int64_t *at;
    Py_ssize_t num;
} Array;

/* Borrow the arrays of `args`; returns how many could be. */
static int borrow(Array *arrays, PyObject *const *args, int num)
{
    for (int i = 0; i < num; i++) {
        if (PyObject_GetBuffer(args[i], &arrays[i].view, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0)
            return i;
        const char *format = arrays[i].view.format;
        if (!format || (strcmp(format, "l") && strcmp(format, "q")) ||
            arrays[i].view.itemsize != sizeof(int64_t)) {
            PyErr_Format(PyExc_TypeError, "array %d is not of int64", i);
            PyBuffer_Release(&arrays[i].view);
            return i;
        }
        arrays[i].at = arrays[i].view.buf;
        arrays[i].num = arrays[i].view.len / (Py_ssize_t)sizeof(int64_t);
    }
    return num;
}

static void give_back(Array *arrays, int num)
{
    for (int i = 0; i < num; i++)
        PyBuffer_Release(&arrays[i].view);
}

static PyObject *room_for(Py_ssize_t num, size_t size)
{
    return PyByteArray_FromStringAndSize(NULL, num * (Py_ssize_t)size);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* --- groups --- */

typedef struct {
    int64_t begin, end, last;
} Interval;

/* `groups._intervals`: at most num - 1 of them. `open` has room for as many places. */
static Py_ssize_t find_intervals(
    const int64_t *common, Py_ssize_t num_ranks, Interval *found, Py_ssize_t *open)
{
    Py_ssize_t num = 0, depth = 0;
    for (Py_ssize_t rank = 0; rank + 1 < num_ranks; rank++) {
        int64_t length = common[rank], begin = rank;
        Py_ssize_t place = num;
        while (depth && found[open[depth - 1]].last > length) {
            place = open[--depth];
            found[place].end = rank + 1;
            begin = found[place].begin;
        }
        if (length > (depth ? found[open[depth - 1]].last : 0)) {
            memmove(found + place + 1, found + place, (num - place) * sizeof *found);
            found[place] = (Interval){begin, num_ranks, length};
            open[depth++] = place;
            num++;
        }
    }
    return num;
}

/* groups(slot_at, common, member_of, members, slots, min_saved)
 * -> order, columns [6, groups], num_levels, own, depth, as `PrefixForest._make_groups` */
static PyObject *groups(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Array arrays[4];
    PyObject *order = NULL, *columns = NULL, *own = NULL, *depth = NULL, *result = NULL;
    void *scratch = NULL;
    if (num_args != 6) {
        PyErr_SetString(PyExc_TypeError, "groups takes six arguments");
        return NULL;
    }
    int num_arrays = borrow(arrays, args, 4);
    if (num_arrays < 4)
        goto out;
    int64_t slots = PyLong_AsLongLong(args[4]), min_saved = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred())
        goto out;
    const int64_t *slot_at = arrays[0].at, *common = arrays[1].at, *member_of = arrays[2].at;
    const int64_t *members = arrays[3].at;
    Py_ssize_t num = arrays[3].num, num_known = arrays[0].num, num_slots = arrays[2].num;

    /* index_of; between, ends and positions of groups around, places of open intervals; groups;
     * intervals. */
    scratch = malloc(
        sizeof(int64_t) * (num_slots + 10 * (num + 1)) + sizeof(Interval) * (num + 1));
    order = room_for(num, sizeof(int64_t));
    own = room_for(num, sizeof(int64_t));
    depth = room_for(num, sizeof(int64_t));
    if (!scratch || !order || !own || !depth) {
        PyErr_NoMemory();
        goto out;
    }
    int64_t *index_of = scratch, *between = index_of + num_slots;
    int64_t *around_end = between + num + 1, *around_last = around_end + num + 1;
    Py_ssize_t *open = (Py_ssize_t *)(around_last + num + 1);
    int64_t *group = (int64_t *)(open + num + 1);
    Interval *found = (Interval *)(group + 6 * (num + 1));
    int64_t *orders = (int64_t *)PyByteArray_AS_STRING(order);
    int64_t *owns = (int64_t *)PyByteArray_AS_STRING(own);
    int64_t *depths = (int64_t *)PyByteArray_AS_STRING(depth);

    for (Py_ssize_t slot = 0; slot < num_slots; slot++)
        index_of[slot] = -1;
    for (Py_ssize_t i = 0; i < num; i++) {
        int64_t slot = members[i] & slots;
        if (slot >= num_slots || member_of[slot] != members[i] || index_of[slot] >= 0) {
            PyErr_SetString(PyExc_AssertionError, "a request was not put in");
            goto out;
        }
        index_of[slot] = i;
    }
    Py_ssize_t ranks = 0;
    int64_t least = INT64_MAX;
    for (Py_ssize_t place = 0; place < num_known && ranks < num; place++) {
        int64_t index = index_of[slot_at[place]];
        if (index >= 0) {
            if (ranks)
                between[ranks - 1] = least;
            orders[ranks++] = index;
            least = common[place];
        } else
            least = smaller(least, common[place]);
    }
    Py_ssize_t num_found = find_intervals(between, num, found, open);

    memset(owns, 0, num * sizeof *owns);
    memset(depths, 0, num * sizeof *depths);
    Py_ssize_t num_groups = 0, level = 0, num_levels = 0;
    for (Py_ssize_t i = 0; i < num_found; i++) {
        int64_t begin = found[i].begin, end = found[i].end, last = found[i].last;
        while (level && around_end[level - 1] <= begin)
            level--;
        int64_t read = level ? around_last[level - 1] : 0;
        int64_t saved = (end - begin - 1) * (last - read);
        if (saved < min_saved)
            continue;
        int64_t numbers[6] = {begin, end, read, last, level, saved};
        memcpy(group + 6 * num_groups++, numbers, sizeof numbers);
        around_end[level] = end;
        around_last[level++] = last;
        if (level > num_levels)
            num_levels = level;
        owns[begin] += last - read;
        depths[begin]++;
        if (end < num) {
            owns[end] -= last - read;
            depths[end]--;
        }
    }
    for (Py_ssize_t rank = 1; rank < num; rank++) {
        owns[rank] += owns[rank - 1];
        depths[rank] += depths[rank - 1];
    }
    columns = room_for(6 * num_groups, sizeof(int64_t));
    if (!columns)
        goto out;
    int64_t *column = (int64_t *)PyByteArray_AS_STRING(columns);
    for (Py_ssize_t i = 0; i < 6 * num_groups; i++)
        column[i % 6 * num_groups + i / 6] = group[i];
    result = Py_BuildValue("OOnOO", order, columns, num_levels, own, depth);
out:
    free(scratch);
    Py_XDECREF(order);
    Py_XDECREF(columns);
    Py_XDECREF(own);
    Py_XDECREF(depth);
    give_back(arrays, num_arrays);
    return result;
}

/* --- plan --- */

typedef struct {
    int64_t first, num, request, begin, end, limit, piece;
    int64_t height, num_splits, step;
} Tile;

/* plan(order, begin, end, first, last, own, num_queries, seq_lens, capacities,
 *      num_kv_heads, programs, min_split)
 * -> items, starts, token_order, bases, all int32, as `plan.plan_by_arrays`; the groups' own columns
 * are begin to last */
static PyObject *plan(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Array arrays[9];
    PyObject *items = NULL, *starts = NULL, *token_order = NULL, *bases = NULL, *result = NULL;
    void *scratch = NULL;
    Tile *tiles = NULL;
    if (num_args != 12) {
        PyErr_SetString(PyExc_TypeError, "plan takes twelve arguments");
        return NULL;
    }
    int num_arrays = borrow(arrays, args, 9);
    if (num_arrays < 9)
        goto out;
    int64_t num_kv_heads = PyLong_AsLongLong(args[9]), programs = PyLong_AsLongLong(args[10]);
    int64_t min_split = PyLong_AsLongLong(args[11]);
    if (PyErr_Occurred())
        goto out;
    const int64_t *order = arrays[0].at, *begin = arrays[1].at, *end = arrays[2].at;
    const int64_t *first = arrays[3].at, *last = arrays[4].at, *own = arrays[5].at;
    const int64_t *num_queries = arrays[6].at, *seq_lens = arrays[7].at, *capacities = arrays[8].at;
    Py_ssize_t num = arrays[0].num, num_groups = arrays[1].num, num_heights = arrays[8].num;
    int is_alike = arrays[5].num == num && arrays[6].num == num && arrays[7].num == num;
    for (int i = 2; i < 5; i++)
        is_alike = is_alike && arrays[i].num == num_groups;
    if (!is_alike || num_heights < 1 || num_heights > MAX_HEIGHTS || programs < 1) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a plan do not belong together");
        goto out;
    }

    /* first_token, query_begin, pieces of the groups around each; first tiles of stretches; ends of
     * groups around a group, and pieces so far. */
    Py_ssize_t num_stretches = num_groups + num;
    scratch = calloc(3 * (num + 1) + num_stretches + 1 + 2 * (num_groups + 1), sizeof(int64_t));
    if (!scratch) {
        PyErr_NoMemory();
        goto out;
    }
    int64_t *first_token = scratch, *query_begin = first_token + num + 1;
    int64_t *before = query_begin + num + 1, *first_tile = before + num + 1;
    int64_t *around_end = first_tile + num_stretches + 1, *so_far = around_end + num_groups + 1;

    for (Py_ssize_t i = 0; i < num; i++) {
        if (order[i] < 0 || order[i] >= num) {
            PyErr_SetString(PyExc_ValueError, "the order is none of the batch");
            goto out;
        }
        if (num_queries[i] < 1) {
            PyErr_SetString(PyExc_AssertionError, "every request has a new token");
            goto out;
        }
        query_begin[i + 1] = query_begin[i] + num_queries[i];
    }
    for (Py_ssize_t rank = 0; rank < num; rank++) {
        int64_t count = num_queries[order[rank]];
        first_token[rank + 1] = first_token[rank] + count;
        if (seq_lens[order[rank]] - count < own[rank]) {
            PyErr_SetString(PyExc_AssertionError, "a new token in a shared prefix");
            goto out;
        }
    }
    Py_ssize_t num_tokens = first_token[num];

    /* Stretches are groups, then requests; their tiles. */
    for (Py_ssize_t i = 0; i < num_stretches; i++) {
        Py_ssize_t rank = i - num_groups;
        if (i < num_groups && !(0 <= begin[i] && begin[i] < end[i] && end[i] <= num)) {
            PyErr_SetString(PyExc_ValueError, "a group is none of the batch");
            goto out;
        }
        int64_t tokens = i < num_groups ? first_token[end[i]] - first_token[begin[i]]
                                        : first_token[rank + 1] - first_token[rank];
        Py_ssize_t height = 0;
        while (height + 1 < num_heights && capacities[height] < tokens)
            height++;
        first_tile[i + 1] = first_tile[i] + up(tokens, capacities[height]);
    }
    Py_ssize_t num_tiles = first_tile[num_stretches];
    tiles = malloc(sizeof *tiles * (num_tiles + 1));
    if (!tiles) {
        PyErr_NoMemory();
        goto out;
    }
    double totals[MAX_HEIGHTS] = {0};
    for (Py_ssize_t i = 0; i < num_stretches; i++) {
        int is_group = i < num_groups;
        Py_ssize_t rank = is_group ? begin[i] : i - num_groups;
        int64_t token = first_token[rank], tokens = first_token[is_group ? end[i] : rank + 1] - token;
        int64_t seen = seq_lens[order[rank]] - num_queries[order[rank]];
        Py_ssize_t height = 0;
        while (height + 1 < num_heights && capacities[height] < tokens)
            height++;
        for (Py_ssize_t j = first_tile[i]; j < first_tile[i + 1]; j++) {
            int64_t within = (j - first_tile[i]) * capacities[height];
            Tile *tile = tiles + j;
            tile->first = token + within;
            tile->num = smaller(capacities[height], tokens - within);
            tile->request = order[rank];
            tile->begin = is_group ? first[i] : own[rank];
            tile->limit = is_group ? UNLIMITED : seen + within;
            /* None of its own reads what is behind its last token. */
            tile->end = is_group ? last[i] : tile->limit + tile->num;
            tile->height = height;
            totals[height] += (double)(tile->end - tile->begin);
        }
    }

    /* Splits, as even as it takes for all programs to have work in each height's launch. */
    Py_ssize_t num_items = 0, num_of_height[MAX_HEIGHTS] = {0};
    for (Py_ssize_t j = 0; j < num_tiles; j++) {
        Tile *tile = tiles + j;
        double share = ceil(totals[tile->height] * (double)num_kv_heads / (double)programs);
        int64_t most = share > (double)min_split ? (int64_t)share : min_split;
        int64_t span = tile->end - tile->begin;
        tile->num_splits = span > most ? up(span, most) : 1;
        tile->step = up(span, tile->num_splits);
        num_of_height[tile->height] += tile->num_splits;
        num_items += tile->num_splits;
    }

    /* Pieces: those of a token's groups first, outermost first, then those of its own part. */
    Py_ssize_t level = 0;
    for (Py_ssize_t i = 0; i < num_groups; i++) {
        while (level && around_end[level - 1] <= begin[i])
            level--;
        int64_t piece = level ? so_far[level - 1] : 0;
        int64_t num_splits = tiles[first_tile[i]].num_splits;
        for (Py_ssize_t j = first_tile[i]; j < first_tile[i + 1]; j++)
            tiles[j].piece = piece;
        around_end[level] = end[i];
        so_far[level++] = piece + num_splits;
        before[begin[i]] += num_splits;
        before[end[i]] -= num_splits;
    }
    items = room_for(num_items * NUM_FIELDS, sizeof(int32_t));
    starts = room_for(num_heights + 1, sizeof(int32_t));
    token_order = room_for(num_tokens, sizeof(int32_t));
    bases = room_for(num_tokens + 1, sizeof(int32_t));
    if (!items || !starts || !token_order || !bases)
        goto out;
    int32_t *base = (int32_t *)PyByteArray_AS_STRING(bases);
    int32_t *query = (int32_t *)PyByteArray_AS_STRING(token_order);
    *base = 0;
    for (Py_ssize_t rank = 0; rank < num; rank++) {
        if (rank)
            before[rank] += before[rank - 1];
        for (int64_t i = query_begin[order[rank]]; i < query_begin[order[rank] + 1]; i++)
            *query++ = (int32_t)i;
        for (Py_ssize_t j = first_tile[num_groups + rank]; j < first_tile[num_groups + rank + 1];
             j++) {
            int64_t pieces = before[rank] + tiles[j].num_splits;
            /* A token with a single piece needs no room for it. */
            tiles[j].piece = pieces == 1 ? ONLY : before[rank];
            for (int64_t i = 0; i < tiles[j].num; i++, base++)
                base[1] = *base + (int32_t)(pieces == 1 ? 0 : pieces);
        }
    }

    /* Tiles of one span stand next to each other, so that they run at the same time and all but the
     * first find it in the cache of the device. */
    int32_t *item = (int32_t *)PyByteArray_AS_STRING(items);
    int32_t *start = (int32_t *)PyByteArray_AS_STRING(starts);
    *start = 0;
    for (Py_ssize_t height = 0; height < num_heights; height++) {
        start[height + 1] = start[height] + (int32_t)num_of_height[height];
        for (Py_ssize_t i = 0; i < num_stretches; i++) {
            Tile *its = tiles + first_tile[i], *behind = tiles + first_tile[i + 1];
            if (its == behind || its->height != height)
                continue;
            int64_t most_splits = 0;
            for (Tile *tile = its; tile < behind; tile++)
                most_splits = tile->num_splits > most_splits ? tile->num_splits : most_splits;
            for (int64_t split = 0; split < most_splits; split++)
                for (Tile *tile = its; tile < behind; tile++) {
                    if (split >= tile->num_splits)
                        continue;
                    int64_t span = tile->end - tile->begin;
                    *item++ = (int32_t)tile->first;
                    *item++ = (int32_t)tile->num;
                    *item++ = (int32_t)tile->request;
                    *item++ = (int32_t)(tile->begin + smaller(split * tile->step, span));
                    *item++ = (int32_t)(tile->begin + smaller((split + 1) * tile->step, span));
                    *item++ = (int32_t)tile->limit;
                    *item++ = (int32_t)(tile->piece + split);
                    *item++ = 0;
                }
        }
    }
    result = Py_BuildValue("OOOO", items, starts, token_order, bases);
out:
    free(scratch);
    free(tiles);
    Py_XDECREF(items);
    Py_XDECREF(starts);
    Py_XDECREF(token_order);
    Py_XDECREF(bases);
    give_back(arrays, num_arrays);
    return result;
}

static PyMethodDef methods[] = {
    {"groups", (PyCFunction)(void (*)(void))groups, METH_FASTCALL, NULL},
    {"plan", (PyCFunction)(void (*)(void))plan, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "cosched_host", NULL, -1, methods};

PyMODINIT_FUNC PyInit_cosched_host(void) { return PyModule_Create(&module); }
