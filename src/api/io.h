/* api/io.h: safetensors files. Parsed as if an enemy wrote them: every size and offset is checked against the file before
 * anything is allocated. */

typedef struct te_safetensors te_safetensors;
typedef struct te_safetensors_entry {
    const char *name; /* borrowed from the file handle */
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
    uint64_t offset, bytes; /* within the data section */
} te_safetensors_entry;

/* Reads the header. Owned: te_safetensors_close. NULL with TE_ERR_IO or TE_ERR_FORMAT; for what is no regular file too. */
TE_API te_safetensors *te_safetensors_open(te_ctx *te, const char *path);
TE_API void te_safetensors_close(te_safetensors *f);
TE_API int te_safetensors_count(const te_safetensors *f);
TE_API const te_safetensors_entry *te_safetensors_at(const te_safetensors *f, int index);
TE_API const te_safetensors_entry *te_safetensors_find(const te_safetensors *f, const char *name);
TE_API const char *te_safetensors_metadata(const te_safetensors *f, const char *key); /* NULL if there is none */
/* A new tensor with the entry's content. */
TE_API te_tensor *te_safetensors_read(te_safetensors *f, const char *name);
/* Into an existing tensor: shape and format must match. */
TE_API te_result te_safetensors_read_into(te_safetensors *f, const char *name, te_tensor *dst);

typedef struct te_safetensors_item {
    const char *name;
    const te_tensor *tensor;
} te_safetensors_item;
/* Temporary file PATH.HOST.PROCESS.SERIAL.tmp beside it, sync, rename: what was there before stays whole until then, and if anything fails. A process
 * that is killed while it writes leaves its temporary file; the next one that writes or opens the same path removes it (one of another host not until an
 * hour after its last write). A symbolic link stays, and the file that it leads to is replaced. A folder, a pipe or a device is refused. Syncs the
 * device. */
TE_API te_result te_safetensors_write(te_ctx *te, const char *path, const te_safetensors_item *items, int num_items,
                                      const te_metadata *metadata, int num_metadata);
