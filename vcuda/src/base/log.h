/* What a tenant's process may say: one line on stderr per condition, never more, never blocking, never a signal. */
#ifndef VC_LOG_H
#define VC_LOG_H

enum vc_notice {
    VC_NOTICE_ABSENT,
    VC_NOTICE_DAMAGED,
    VC_NOTICE_UNCOUNTED,
    VC_NOTICE_TWICE,
    VC_NOTICE_NO_SLOT,
    VC_NOTICE_ACCOUNT,
    VC_NOTICE_NO_DRIVER,
    VC_NOTICE_UNKNOWN_CARD,
    VC_NOTICE_UNKNOWN_SYMBOL,
    VC_NOTICE_COMPUTE_LIMITS,
    VC_NOTICE_OVERSOLD,
    VC_NOTICE_REFUSED,
    VC_NOTICE_LOCKED_OUT,
    VC_NOTICE_COUNT
};

/* Write "vcuda: …" as one line, the first time that `notice` occurs in this process or in the one it was forked from; nothing where
 * the environment says VCUDA_LOG=0. */
void vc_log_once(enum vc_notice notice, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
