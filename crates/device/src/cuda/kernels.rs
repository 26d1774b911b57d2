//! The kernels in the binary, and loading them.
//!
//! `kernels/built` holds, for each file of kernels, PTX for compute capability 8.0 and what ptxas
//! makes of it for the architectures named here. A GPU gets the binary of its own major
//! architecture with the largest minor one that does not exceed its own; one without gets the PTX,
//! which the driver compiles (and keeps for later starts).

use super::context::{Context, check};
use super::launch::MAX_SHARED;
use super::lock;
use crate::error::DeviceError;
use crate::ops::Result;
use cudarc::driver::sys;
use flate2::read::GzDecoder;
use std::collections::HashMap;
use std::ffi::CString;
use std::io::Read;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

/// One file of kernels, compressed.
struct Source {
    ptx: &'static [u8],
    /// Architecture (major, minor) and machine code.
    binaries: [((i32, i32), &'static [u8]); 4],
}

macro_rules! sources {
    ($($stem:literal),* $(,)?) => {
        [$(Source {
            ptx: built!($stem, ".ptx.gz"),
            binaries: [
                ((8, 0), built!($stem, ".sm_80.cubin.gz")),
                ((8, 6), built!($stem, ".sm_86.cubin.gz")),
                ((8, 9), built!($stem, ".sm_89.cubin.gz")),
                ((9, 0), built!($stem, ".sm_90.cubin.gz")),
            ],
        }),*]
    };
}

macro_rules! built {
    ($stem:literal, $end:literal) => {
        include_bytes!(concat!("../../kernels/built/", $stem, $end))
    };
}

/// Every file in `kernels`.
static SOURCES: &[Source] = &sources![
    "linear",
    "tile",
    "rows",
    "norm",
    "rope",
    "streams",
    "attend",
    "select",
    "experts",
    "experts_many",
    "route",
    "sample",
    "engram",
    "compress",
    "join",
    "random",
    "limits",
];

impl Source {
    /// What a GPU of this architecture loads.
    fn image(&self, capability: (i32, i32)) -> &'static [u8] {
        let fits = |arch: &(i32, i32)| arch.0 == capability.0 && arch.1 <= capability.1;
        let best = self.binaries.iter().filter(|(arch, _)| fits(arch)).max_by_key(|(arch, _)| arch);
        best.map_or(self.ptx, |(_, image)| image)
    }
}

/// Loaded kernels.
pub(super) struct Kernels {
    context: Arc<Context>,
    modules: Vec<sys::CUmodule>,
    functions: Mutex<HashMap<String, Function>>,
}

/// A kernel.
#[derive(Clone, Copy)]
pub(super) struct Function(pub(super) sys::CUfunction);

// SAFETY: functions may be launched by any thread.
unsafe impl Send for Function {}
// SAFETY: modules and functions may be used by any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; the table is behind a lock.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Tells `progress` how many of how many files are loaded.
    pub(super) fn load(
        context: &Arc<Context>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        context.bind()?;
        let functions = Mutex::new(HashMap::new());
        let mut this = Self { context: context.clone(), modules: Vec::new(), functions };
        for (done, source) in SOURCES.iter().enumerate() {
            progress(done, SOURCES.len());
            let mut image = Vec::new();
            let operation = "unpacking kernels";
            GzDecoder::new(source.image(context.info.capability))
                .read_to_end(&mut image)
                .map_err(|e| DeviceError::Driver { operation, error: e.to_string() })?;
            // PTX is text that ends with a zero.
            image.push(0);
            let mut module = null_mut();
            // SAFETY: the image is whole; the driver copies it.
            let result = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
            check("loading kernels", result)?;
            this.modules.push(module);
        }
        Ok(this)
    }

    /// The kernel with this name, with leave for `shared` bytes of dynamic shared memory.
    pub(super) fn get(
        &self,
        operation: &'static str,
        name: &str,
        shared: usize,
    ) -> Result<Function> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        self.context.bind()?;
        let unknown = || DeviceError::Driver { operation, error: format!("no kernel {name}") };
        let c_name = CString::new(name).map_err(|_| unknown())?;
        for module in &self.modules {
            let mut function = null_mut();
            // SAFETY: the module is loaded; the name ends with a zero.
            let result =
                unsafe { sys::cuModuleGetFunction(&mut function, *module, c_name.as_ptr()) };
            if result == sys::CUresult::CUDA_SUCCESS {
                if shared > MAX_SHARED {
                    let most =
                        sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    let bytes = i32::try_from(shared).unwrap_or(i32::MAX);
                    // SAFETY: the function is loaded.
                    let result = unsafe { sys::cuFuncSetAttribute(function, most, bytes) };
                    check(operation, result)?;
                }
                let function = Function(function);
                functions.insert(name.to_owned(), function);
                return Ok(function);
            }
        }
        Err(unknown())
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.sync().is_ok() {
            for module in &self.modules {
                // SAFETY: no kernel of it runs, and nobody else has the functions.
                let _ = unsafe { sys::cuModuleUnload(*module) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_gets_its_own_binary_or_ptx() {
        let source = &SOURCES[0];
        let is = |capability, want: &[u8]| std::ptr::eq(source.image(capability), want);
        let binary = |i: usize| source.binaries[i].1;
        assert!(is((8, 0), binary(0)) && is((8, 6), binary(1)) && is((8, 7), binary(1)));
        assert!(is((8, 9), binary(2)) && is((9, 0), binary(3)));
        assert!(is((10, 0), source.ptx) && is((12, 1), source.ptx));
    }

    #[test]
    fn everything_unpacks() {
        for source in SOURCES {
            for (_, image) in source.binaries.iter().chain([&((0, 0), source.ptx)]) {
                let mut bytes = Vec::new();
                GzDecoder::new(*image).read_to_end(&mut bytes).expect("unpacks");
                assert!(bytes.starts_with(b"\x7fELF") || bytes.starts_with(b"//"));
            }
        }
    }
}
