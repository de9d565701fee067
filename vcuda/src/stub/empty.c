/* A library without symbols: linking against it records only its SONAME as DT_NEEDED. */
typedef int vc_stub_translation_unit_is_not_empty;
