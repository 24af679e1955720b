/* api/io.h: reads and writes safetensors files. Nothing in a file is trusted: every size and offset is checked before
 * memory is allocated. */

/* An open file, made by te_safetensors_open. */
typedef struct te_safetensors te_safetensors;
/* One tensor of an open file. */
typedef struct te_safetensors_entry {
    const char *name;           /* borrowed from the file handle */
    te_dtype dtype;             /* TE_DTYPE_NONE for a format that te.h does not have */
    int ndim;                   /* number of dimensions */
    int64_t shape[TE_MAX_DIMS]; /* the first ndim entries are the sizes */
    uint64_t offset, bytes;     /* position and length in the data section of the file */
} te_safetensors_entry;

/* Opens a file and reads its header. The caller owns the result and must call te_safetensors_close. NULL with TE_ERR_IO
 * or TE_ERR_FORMAT on failure; anything but a regular file gives TE_ERR_IO. */
TE_API te_safetensors *te_safetensors_open(te_ctx *te, const char *path);
/* Closes the file; its entries and names become invalid. `f` may be NULL. */
TE_API void te_safetensors_close(te_safetensors *f);
/* Returns the number of tensors. */
TE_API int te_safetensors_count(const te_safetensors *f);
/* Returns tensor number `index`, in the order of the file's data (borrowed); NULL outside 0 .. count - 1. */
TE_API const te_safetensors_entry *te_safetensors_at(const te_safetensors *f, int index);
/* Returns the tensor with the given name (borrowed); NULL if there is none. */
TE_API const te_safetensors_entry *te_safetensors_find(const te_safetensors *f, const char *name);
/* Returns the value of the metadata entry `key` (borrowed); NULL if there is none. */
TE_API const char *te_safetensors_metadata(const te_safetensors *f, const char *key);
/* Returns a new tensor with the content of the entry `name`, in the innermost scope. TE_ERR_INVALID if there is no such
 * entry. */
TE_API te_tensor *te_safetensors_read(te_safetensors *f, const char *name);
/* Reads the entry `name` into dst, whose shape and format must be the entry's (TE_ERR_SHAPE, TE_ERR_DTYPE). */
TE_API te_result te_safetensors_read_into(te_safetensors *f, const char *name, te_tensor *dst);

/* One tensor to write; name and tensor are borrowed for the call. */
typedef struct te_safetensors_item {
    const char *name;        /* UTF-8, unique in the file */
    const te_tensor *tensor; /* a plain tensor of the context that writes */
} te_safetensors_item;
/* Writes a file atomically: the data goes to the temporary file PATH.HOST.PROCESS.SERIAL.tmp in the same folder. This
 * file is flushed to the disk and renamed. Syncs. Errors are TE_ERR_IO and TE_ERR_INVALID. If the context already has
 * an error, nothing is written and that error is returned.
 * The target of a symbolic link is replaced. A folder, a pipe or a device is refused.
 * A killed process leaves its temporary file. The next process that writes or opens the same path removes it. It
 * removes a file from another host only if the last write to that file was more than an hour ago. */
TE_API te_result te_safetensors_write(te_ctx *te, const char *path, const te_safetensors_item *items, int num_items,
                                      const te_metadata *metadata, int num_metadata);
