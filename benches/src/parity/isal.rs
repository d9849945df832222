//! Intel's ISA-L as peer and oracle, loaded at run time from Debian's `libisal2`.

use std::ffi::{CStr, c_int, c_uchar, c_void};

type Generate = unsafe extern "C" fn(c_int, c_int, *mut *mut c_void) -> c_int;
type InitTables = unsafe extern "C" fn(c_int, c_int, *const c_uchar, *mut c_uchar);
type Encode = unsafe extern "C" fn(c_int, c_int, c_int, *mut c_uchar, *mut *mut c_uchar, *mut *mut c_uchar);
type Invert = unsafe extern "C" fn(*mut c_uchar, *mut c_uchar, c_int) -> c_int;

/// Bytes of ISA-L's table for a coefficient.
const TABLE_BYTES: usize = 32;

/// The functions of the library (raid.h, erasure_code.h).
#[derive(Clone, Copy)]
pub struct Isal {
    xor_gen: Generate,
    pq_gen: Generate,
    init_tables: InitTables,
    encode_data: Encode,
    #[cfg_attr(not(test), expect(dead_code, reason = "an oracle of the tests"))]
    invert_matrix: Invert,
}

/// Coefficients in the form that `ec_encode_data` requires.
pub struct Tables {
    sources: usize,
    targets: usize,
    bytes: Vec<u8>,
}

impl Isal {
    /// Loads the library; `None` if it is not installed. It selects its functions by the processor,
    /// or those for AVX2 for a comparison with ours.
    pub fn load(is_avx2: bool) -> Option<Isal> {
        let [xor, pq, encode] = match is_avx2 {
            false => [c"xor_gen", c"pq_gen", c"ec_encode_data"],
            true => [c"xor_gen_avx", c"pq_gen_avx2", c"ec_encode_data_avx2"],
        };
        // SAFETY: loading the library runs only its selection of instructions; the types are those
        // of its headers.
        unsafe {
            let library = libc::dlopen(c"libisal.so.2".as_ptr(), libc::RTLD_NOW);
            let symbol = |name: &CStr| {
                let found = if library.is_null() { library } else { libc::dlsym(library, name.as_ptr()) };
                (!found.is_null()).then_some(found)
            };
            Some(Isal {
                xor_gen: std::mem::transmute::<*mut c_void, Generate>(symbol(xor)?),
                pq_gen: std::mem::transmute::<*mut c_void, Generate>(symbol(pq)?),
                init_tables: std::mem::transmute::<*mut c_void, InitTables>(symbol(c"ec_init_tables")?),
                encode_data: std::mem::transmute::<*mut c_void, Encode>(symbol(encode)?),
                invert_matrix: std::mem::transmute::<*mut c_void, Invert>(symbol(c"gf_invert_matrix")?),
            })
        }
    }

    /// Computes parity P after the data, or P and Q, in one array of strips, all aligned to 32
    /// bytes.
    ///
    /// # Safety
    /// Every strip is valid for `len` bytes; the last one or two are writable.
    pub unsafe fn generate(&self, strips: &mut [*mut u8], parity: usize, len: usize) {
        let function = if parity == 1 { self.xor_gen } else { self.pq_gen };
        // SAFETY: by contract.
        let failed = unsafe { function(strips.len() as c_int, len as c_int, strips.as_mut_ptr().cast()) };
        assert_eq!(failed, 0, "ISA-L refuses {} strips of {len} bytes", strips.len());
    }

    /// Tables of the coefficients `rows` (target `t` of source `s` at `t * sources + s`).
    pub fn tables(&self, rows: &[u8], sources: usize) -> Tables {
        let targets = rows.len() / sources;
        let mut bytes = vec![0; TABLE_BYTES * rows.len()];
        // SAFETY: the tables have the size that erasure_code.h requires.
        unsafe { (self.init_tables)(sources as c_int, targets as c_int, rows.as_ptr(), bytes.as_mut_ptr()) };
        Tables { sources, targets, bytes }
    }

    /// Computes every target as the sum of the sources by its coefficients.
    ///
    /// # Safety
    /// Every strip is valid for `len` bytes; their number matches the tables.
    pub unsafe fn encode(
        &self,
        tables: &Tables,
        sources: &mut [*mut u8],
        targets: &mut [*mut u8],
        len: usize,
    ) {
        assert!(sources.len() == tables.sources && targets.len() == tables.targets);
        let (k, m) = (tables.sources as c_int, tables.targets as c_int);
        // SAFETY: by contract; the library does not write to the tables.
        unsafe {
            let bytes = tables.bytes.as_ptr().cast_mut();
            (self.encode_data)(len as c_int, k, m, bytes, sources.as_mut_ptr(), targets.as_mut_ptr());
        }
    }

    /// The inverse of a square matrix.
    #[cfg(test)]
    pub fn invert(&self, mut rows: Vec<u8>, size: usize) -> Option<Vec<u8>> {
        let mut inverse = vec![0; size * size];
        // SAFETY: both have `size`² cells.
        let failed = unsafe { (self.invert_matrix)(rows.as_mut_ptr(), inverse.as_mut_ptr(), size as c_int) };
        (failed == 0).then_some(inverse)
    }
}
