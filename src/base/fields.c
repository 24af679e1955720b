/* base/fields.c: tables of the fields of public structs. Functions use the tables to find the fields that a caller has
 * set, and to compare structs without their padding. */

/* One field of a struct, or of a group of options that is embedded in the struct. */
typedef struct te__field {
    const char *name; /* for messages: "amax_epsilon", "nvfp4.four_over_six" */
    size_t offset, size;
    int mark; /* a bit mask: bit `kind` is 1 if that kind (of recipe, or of quantizer) reads the field. 0 where the kind
               * does not matter */
} te__field;
#define TE__FIELD(type, field, mark) {#field, offsetof(type, field), sizeof(((type *)0)->field), mark}
/* An entry for a field of an embedded group. Not every compiler accepts offsetof for a member of a member. */
#define TE__FIELD_IN(type, group, group_type, field, mark)                                                           \
    {#group "." #field, offsetof(type, group) + offsetof(group_type, field), sizeof(((group_type *)0)->field), mark}

/* te__is_switch: whether an option is a value of te_switch. te__switch: whether the option is on. */
static bool te__is_switch(te_switch given) { return (int)given >= TE_DEFAULT && given <= TE_OFF; }
static bool te__switch(te_switch given, bool by_default) { return given == TE_DEFAULT ? by_default : given == TE_ON; }

/* Returns whether any bit of the field is set. Every forward pass calls this function often, so common sizes take one
 * load. */
static bool te__field_is_set(const void *s, const te__field *f) {
    const unsigned char *bytes = (const unsigned char *)s + f->offset;
    uint64_t eight;
    uint32_t four;
    size_t i;
    if (f->size == sizeof(eight)) {
        memcpy(&eight, bytes, sizeof(eight));
        return eight != 0;
    }
    if (f->size == sizeof(four)) {
        memcpy(&four, bytes, sizeof(four));
        return four != 0;
    }
    for (i = 0; i < f->size; i++)
        if (bytes[i]) return true;
    return false;
}

/* Returns whether all fields of the table are the same in a and b, to the bit. */
static bool te__fields_same(const void *a, const void *b, const te__field *fields, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (memcmp((const char *)a + fields[i].offset, (const char *)b + fields[i].offset, fields[i].size) != 0)
            return false;
    return true;
}

/* A list of a struct's fields is a macro LIST(T, O). It expands to T(field) or O(field) for each field. In the args of
 * an operation, T marks tensors. */
#define TE__UNCOUNTED(field)
#define TE__COUNTED(field) +1
/* Checks at compile time that LIST has all fields of the struct TE__TYPE in order. Use this macro inside a function. A
 * gap of 8 bytes or more between fields is an error, since padding is smaller. Smaller gaps pass; so does everything on
 * 32-bit compilers. */
#define TE__WHOLE(LIST)                                                                                              \
    {                                                                                                                \
        enum { TE__LISTED_BEGIN = -1, LIST(TE__LISTED, TE__LISTED) TE__LISTED_END };                                 \
        LIST(TE__LISTED_NEXT, TE__LISTED_NEXT) TE__LISTED_LAST                                                       \
    }
#define TE__LISTED(field)                                                                                            \
    TE__LISTED_BEFORE_##field,                                                                                       \
        TE__LISTED_AT_##field = (int)(offsetof(TE__TYPE, field) + sizeof(((TE__TYPE *)0)->field)) - 1,
#define TE__LISTED_NEXT(field)                                                                                       \
    TE__STATIC_ASSERT(sizeof(void *) < 8 || offsetof(TE__TYPE, field) - (size_t)TE__LISTED_BEFORE_##field < 8,       \
                      "the list lacks the field before " #field);
#define TE__LISTED_LAST                                                                                              \
    TE__STATIC_ASSERT(sizeof(void *) < 8 || sizeof(TE__TYPE) - (size_t)TE__LISTED_END < 8,                           \
                      "the list lacks the last field");
