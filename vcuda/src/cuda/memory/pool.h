/* Stream-ordered memory: a pool is charged what it has reserved of the card, not what is allocated from it. */
#ifndef VC_POOL_H
#define VC_POOL_H

#include "base/ledger.h"

#include "cuda/driver/hooks.h"

/* Give back what this process's pools on the card hold idle: read what they really have, then trim them. Returns whether
 * the quota became larger. Called before a refusal. */
bool vc_pools_make_room(uint32_t card);

/* Bring all pools' charges to what they really hold; cheap when nothing was freed asynchronously since the last time.
 * For places where the driver may have given memory back by itself: after synchronisation, before a question. */
void vc_pools_settle(void);

/* Memory from a pool was freed by the synchronous free. */
void vc_pool_freed(const struct vc_entry *entry);

#endif
