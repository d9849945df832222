//! The choice of what serves the rings of a virtual machine.

/// The server of the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataPlane {
    /// The cores of this process.
    #[default]
    User,
    /// The kernel, through its device node. Without it, or over anything but a whole block device,
    /// the export does not start.
    Kernel,
    /// The kernel where it can, else the cores.
    Auto,
}
