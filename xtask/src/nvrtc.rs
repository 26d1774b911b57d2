//! NVRTC, called by absolute path.

use crate::toolchain::Toolchain;
use anyhow::{Context, Result, bail};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

type Program = *mut c_void;

/// A loaded NVRTC.
pub struct Nvrtc {
    library: Library,
    _builtins: Library,
}

impl Nvrtc {
    pub fn load(toolchain: &Toolchain) -> Result<Self> {
        let flags = RTLD_NOW | RTLD_GLOBAL;
        // NVRTC looks for its built-in functions by name: they must be there before it.
        // SAFETY: the libraries' initializers do nothing of note.
        let open = |path: &std::path::Path| unsafe { Library::open(Some(path), flags) };
        let _builtins = open(&toolchain.nvrtc_builtins).context("NVRTC's built-ins")?;
        let library = open(&toolchain.nvrtc).context("NVRTC")?;
        Ok(Self { library, _builtins })
    }

    /// # Safety
    /// `F` is the type of the function with this name.
    unsafe fn function<F>(&self, name: &str) -> Result<Symbol<F>> {
        // SAFETY: as the caller promises.
        Ok(unsafe { self.library.get(name.as_bytes()) }?)
    }

    /// Compiles `source` to PTX. What the compiler says goes to the error, or to standard error.
    pub fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Vec<u8>> {
        let (source, name) = (CString::new(source)?, CString::new(name)?);
        let options: Vec<CString> =
            options.iter().map(|o| CString::new(o.as_str())).collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the signatures are those of nvrtc.h; every pointer is valid for its call.
        unsafe {
            let create: Symbol<
                unsafe extern "C" fn(
                    *mut Program,
                    *const c_char,
                    *const c_char,
                    c_int,
                    *const *const c_char,
                    *const *const c_char,
                ) -> c_int,
            > = self.function("nvrtcCreateProgram")?;
            let compile: Symbol<
                unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
            > = self.function("nvrtcCompileProgram")?;
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                self.function("nvrtcDestroyProgram")?;
            let mut program = null_mut();
            let code = create(&mut program, source.as_ptr(), name.as_ptr(), 0, null(), null());
            if code != 0 {
                bail!("NVRTC refuses to start: error {code}");
            }
            let code = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            if code != 0 {
                bail!("{log}");
            }
            if !log.trim().is_empty() {
                eprintln!("{log}");
            }
            let mut ptx = self.text(program, "nvrtcGetPTXSize", "nvrtcGetPTX")?;
            ptx.pop();
            destroy(&mut program);
            Ok(ptx)
        }
    }

    /// One of the texts that belong to a program.
    ///
    /// # Safety
    /// The names are those of a size function and of a text function; the program exists.
    unsafe fn text(&self, program: Program, size: &str, text: &str) -> Result<Vec<u8>> {
        // SAFETY: as the caller promises.
        unsafe {
            let size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> c_int> =
                self.function(size)?;
            let text: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> c_int> =
                self.function(text)?;
            let mut len = 0;
            let code = size(program, &mut len);
            let mut bytes = vec![0u8; len];
            if code != 0 || text(program, bytes.as_mut_ptr().cast()) != 0 {
                bail!("NVRTC does not give its text");
            }
            Ok(bytes)
        }
    }
}
