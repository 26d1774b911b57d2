//! What can go wrong on a device.

/// Errors of device operations. They end the process's work on that device; a request cannot cause
/// them.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Memory ran out.
    #[error("out of device memory: {wanted} bytes wanted for {what}")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        wanted: usize,
    },
    /// A weight has a stored form that the device cannot read.
    #[error("{device} cannot use a {format} weight of {rows} x {cols}: {reason}")]
    Unsupported {
        /// Name of the device.
        device: &'static str,
        /// Stored form.
        format: String,
        /// Rows of the weight.
        rows: usize,
        /// Columns of the weight.
        cols: usize,
        /// Why not.
        reason: String,
    },
    /// The thread pool could not start.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// The thread that runs the device has ended.
    #[error("the device's thread has stopped")]
    Stopped,
    /// A step names a slot without a sequence.
    #[error("slot {slot} has no sequence")]
    EmptySlot {
        /// The slot.
        slot: u32,
    },
    /// There is no NVIDIA driver.
    #[error("no NVIDIA driver (libcuda) on this machine: install one, or use the CPU")]
    NoDriver,
    /// There is no GPU of that number.
    #[error("no CUDA device {ordinal}: the driver has {count}, counted from 0")]
    NoDevice {
        /// Number asked for.
        ordinal: usize,
        /// Devices there are.
        count: usize,
    },
    /// A GPU lacks instructions that the kernels need.
    #[error("{name} has compute capability {major}.{minor}; 8.0 (Ampere) or later is needed")]
    TooOld {
        /// Name of the GPU.
        name: String,
        /// Its architecture.
        major: i32,
        /// Its variant.
        minor: i32,
    },
    /// The driver of a GPU refused a call, or a kernel that ran before it failed.
    #[error("{operation} on the GPU: {error}")]
    Driver {
        /// What was asked for.
        operation: &'static str,
        /// What the driver said.
        error: String,
    },
    /// The operations of a recorded step must not wait, allocate or upload; one did.
    #[error("{operation} inside a step, where nothing may wait for the GPU, allocate or upload")]
    InsideStep {
        /// What was tried.
        operation: &'static str,
    },
    /// A kernel is not made for such a size.
    #[error("{operation} on the GPU cannot take {limit}")]
    Limit {
        /// What was asked for.
        operation: &'static str,
        /// The size, and what the kernel takes.
        limit: String,
    },
}
