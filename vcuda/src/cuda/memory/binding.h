/* Arrays without memory of their own: what is mapped into one stays on the card as long as it lives. */
#ifndef VC_BINDING_H
#define VC_BINDING_H

/* Such an array was made in the current context, with which it ends, or was destroyed. */
void vc_sparse_array_made(const void *array);
void vc_sparse_array_ended(const void *array);

#endif
