//! `qcow2`: an image, and the files that it names.
//!
//! An image can name any file of the host. So a name is followed only on request, and only inside
//! one directory. The format of a backing file is the one that the image states, never a guess: a
//! guest can make its raw disk look like an image.

use super::restart_log::{RestartLogs, check_restored};
use base::Size;
use block::{Device, DeviceError};
use drivers::io_uring;
pub use drivers::io_uring::{UringDevice, WritersAllowed};
use drivers::kind::DeviceConfig;
use qcow2::offline::commit::Target;
pub use qcow2::{Commit, CommitChannel, DEFAULT_CACHE_BYTES, Error, LiveImage, Problem, Snapshot, Stream};
use qcow2::{Header, Image, Others, Qcow2, RestartLog};
#[cfg(feature = "sandbox")]
use sandbox::{Access, Profile};
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, Value, key};
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Limit of backing files below each other.
const MAX_DEPTH: usize = 64;

pub(super) static KIND: Kind = Kind {
    name: "qcow2",
    about: "a disk image in QEMU's format qcow2",
    keys: &[
        key("file", "PATH", "the image"),
        key("backing", "none|auto", "whether backing files are opened that the image names [none]"),
        key("image-dir", "DIR", "directory that backing files must be in [that of the image]"),
        key("data", "PATH", "the external data file, if the image has one"),
        key("snapshot", "NAME", "identifier or name of the internal snapshot to read instead of the disk"),
        key("cache", "SIZE", "most bytes of tables in memory, for each image of a chain [32M]"),
        key(
            "restart-log",
            "DIR|none",
            "directory for a log of new clusters, from which the next server restores writes after a kill of this one \
             [$XDG_RUNTIME_DIR/freestone or /run/freestone]",
        ),
        READ_ONLY,
        ID,
    ],
};

/// How an image is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The image.
    pub file: PathBuf,
    /// Whether backing files are opened that the image names.
    pub follow: bool,
    /// The directory that backing files must be in; else that of the image.
    pub image_dir: Option<PathBuf>,
    /// The external data file.
    pub data: Option<PathBuf>,
    /// The internal snapshot to read.
    pub snapshot: Option<String>,
    /// Most bytes of tables in memory.
    pub cache_bytes: u64,
    /// Refuse writes. A snapshot is only read in any case.
    pub read_only: bool,
    /// The log that keeps writes through a kill of the process.
    pub restart_logs: RestartLogs,
}

impl Options {
    /// An image without other files.
    pub fn new(file: impl Into<PathBuf>) -> Options {
        Options {
            file: file.into(),
            follow: false,
            image_dir: None,
            data: None,
            snapshot: None,
            cache_bytes: DEFAULT_CACHE_BYTES,
            read_only: false,
            restart_logs: RestartLogs::default(),
        }
    }

    fn parse(spec: &Spec) -> Result<Options, SpecError> {
        let options = Options {
            follow: spec.get_or("backing", Follow(false))?.0,
            image_dir: spec.get("image-dir")?,
            data: spec.get("data")?,
            snapshot: spec.get("snapshot")?,
            cache_bytes: spec.get_or("cache", Size(DEFAULT_CACHE_BYTES))?.0,
            read_only: spec.is_on("readonly")?,
            restart_logs: spec.get("restart-log")?.unwrap_or_default(),
            ..Options::new(spec.require::<PathBuf>("file")?)
        };
        match options.check() {
            Ok(()) => Ok(options),
            Err(why) => Err(spec.refuse(why)),
        }
    }

    /// Checks that the options fit each other.
    ///
    /// # Errors
    /// The contradiction.
    pub fn check(&self) -> Result<(), &'static str> {
        match self.image_dir.is_some() && !self.follow {
            true => Err("image-dir= belongs to backing=auto"),
            false => Ok(()),
        }
    }

    /// Whether clients may write.
    fn is_writable(&self) -> bool {
        !self.read_only && self.snapshot.is_none()
    }

    /// The directory that backing files must be in.
    #[cfg(feature = "sandbox")]
    fn directory(&self) -> PathBuf {
        directory_of(&self.file, self.image_dir.as_deref())
    }

    /// Opens the image and the files it needs. Runs a core on the calling thread.
    ///
    /// # Errors
    /// When a file cannot be opened or is no valid image, or the image names a file that may not be
    /// opened.
    pub fn open_parts(&self) -> Result<Opened, DeviceError> {
        let open = |path: &PathBuf| match self.is_writable() {
            true => open_for_writing(path),
            false => open_file(path),
        };
        let top = open(&self.file)?;
        let header = read_header(top.clone())?;
        if let (false, Some(name)) = (self.follow, &header.backing_file) {
            let message = format!("names the backing file {name:?}, which backing=auto would open");
            return Err(DeviceError::new(top.name(), message));
        }
        let below = match self.follow {
            true => open_links(&chain(&self.file, &header, self.image_dir.as_deref())?, self.cache_bytes)?,
            false => None,
        };
        let (backing, backing_file) = below.map(|Below { disk, file }| (disk, file)).unzip();
        let data_file = self.data.as_ref().map(open).transpose()?.map(|file| file as Arc<dyn Device>);
        let others = Others { backing, data_file };
        match self.is_writable() {
            true => {
                let live = open_live(top, others, self.cache_bytes, self.restart_logs.open(&self.file)?)?;
                Ok(Opened { device: live.clone(), live: Some(live), backing_file })
            }
            false => {
                let device = open_image(top, others, self.snapshot.clone(), self.cache_bytes, true)?;
                Ok(Opened::plain(device))
            }
        }
    }

    /// The device that the backing file is, for an image that is committed to it. The image may be
    /// in use.
    ///
    /// # Errors
    /// When the image names none, or one that may not be opened.
    pub fn committed(&self) -> Result<Committed, DeviceError> {
        let header = read_header(open_shared(&self.file)?)?;
        let none = || DeviceError::new(self.file.display().to_string(), "the image has no backing file");
        let mut links = chain(&self.file, &header, self.image_dir.as_deref())?.into_iter();
        let link = links.next().filter(|_| self.follow).ok_or_else(none)?;
        Ok(Committed { spec: self.spec_of(&link, links.len() > 0), link, below: links.collect() })
    }

    /// The specification of the backing file `link`, opened as this image. `has_backing`: there are
    /// files below it.
    fn spec_of(&self, link: &Link, has_backing: bool) -> String {
        let value = |path: &Path| path.display().to_string().replace(',', ",,");
        if link.is_raw {
            return format!("io_uring:path={}", value(&link.path));
        }
        let mut spec = format!("qcow2:file={}", value(&link.path));
        if has_backing {
            spec.push_str(",backing=auto");
            if let Some(directory) = &self.image_dir {
                spec.push_str(&format!(",image-dir={}", value(directory)));
            }
        }
        if self.cache_bytes != DEFAULT_CACHE_BYTES {
            spec.push_str(&format!(",cache={}", self.cache_bytes));
        }
        match &self.restart_logs {
            RestartLogs::Runtime => {}
            RestartLogs::In(directory) => spec.push_str(&format!(",restart-log={}", value(directory))),
            RestartLogs::Off => spec.push_str(",restart-log=none"),
        }
        spec
    }
}

/// The device of a specification.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    Ok(Box::new(Options::parse(spec)?))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(self.open_parts()?.device)
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        for file in [Some(&self.file), self.data.as_ref()].into_iter().flatten() {
            profile.allow(file, if self.is_writable() { Access::Resize } else { Access::Read });
        }
        if self.is_writable() {
            self.restart_logs.keep(&self.file, profile);
        }
        if self.follow {
            profile.allow(self.directory(), Access::Read);
        }
    }

    fn make_read_only(&mut self) {
        self.read_only = true;
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.file)
    }

    fn drop_restart_log(&mut self) {
        if self.restart_logs == RestartLogs::Runtime {
            self.restart_logs = RestartLogs::Off;
        }
    }
}

/// The backing file of an image that is committed to it.
pub struct Committed {
    /// The specification of the device that it is.
    pub spec: String,
    link: Link,
    /// The files below it.
    below: Vec<Link>,
}

impl Committed {
    /// Lets the disk of the backing file have at least `size` bytes. Nothing else may have the file
    /// open for writing. Runs cores, and must not be called on one.
    ///
    /// # Errors
    /// When the file cannot grow.
    pub fn grow(&self, size: u64) -> Result<(), DeviceError> {
        let file = open_shared(&self.link.path)?;
        let has = match self.link.is_raw {
            true => file.limits().capacity,
            false => read_header(file)?.size,
        };
        match has < size {
            true => target(&self.link, &self.below)?.grow(size).map_err(as_device_error),
            // It may have writes that only its restart log has.
            false => Ok(()),
        }
    }
}

/// An open image.
pub struct Opened {
    /// Its disk.
    pub device: Arc<dyn Device>,
    /// The same, if the image is written.
    pub live: Option<Arc<LiveImage>>,
    /// Its backing file, if the image is written and has one.
    pub backing_file: Option<Arc<io_uring::UringDevice>>,
}

impl Opened {
    /// A device that is no image, or is only read.
    pub fn plain(device: Arc<dyn Device>) -> Opened {
        Opened { device, live: None, backing_file: None }
    }
}

/// The backing files below the image at `path`, the nearest first. They must be in `image_dir`,
/// or in the directory of the image.
///
/// # Errors
/// When the image names a file that may not be opened, or that is no image of its format.
pub fn chain(path: &Path, header: &Header, image_dir: Option<&Path>) -> Result<Vec<Link>, DeviceError> {
    let directory = directory_of(path, image_dir);
    let directory = directory.canonicalize().map_err(|error| {
        DeviceError::new(directory.display().to_string(), "cannot find the directory").because(error)
    })?;
    let mut at = in_real_directory(path)?;
    let mut seen = HashSet::from([identity(&at)?]);
    let mut links: Vec<Link> = Vec::new();
    let mut header = header.clone();
    while let Some(name) = &header.backing_file {
        let refuse =
            |why: &str| DeviceError::new(at.display().to_string(), format!("backing file {name:?}: {why}"));
        if links.len() == MAX_DEPTH {
            return Err(refuse(&format!("more than {MAX_DEPTH} backing files below each other")));
        }
        let is_raw = match header.backing_format.as_deref() {
            Some("raw") => true,
            Some("qcow2") => false,
            Some(other) => return Err(refuse(&format!("the format {other:?} is unsupported"))),
            None => return Err(refuse("the image does not state its format")),
        };
        let next = resolve(&at, name, &directory, image_dir.is_some()).map_err(|why| refuse(&why))?;
        if !seen.insert(identity(&next)?) {
            return Err(refuse("the file is its own backing file"));
        }
        links.push(Link { path: next.clone(), is_raw });
        if is_raw {
            break;
        }
        header = read_header(open_file(&next)?)?;
        at = next;
    }
    Ok(links)
}

/// The device of the backing file of the image at `path`, over those below it; `None` if the image
/// names none. The files are only read.
///
/// # Errors
/// As [`chain`], or when a file cannot be opened.
pub fn open_backing(
    path: &Path,
    header: &Header,
    image_dir: Option<&Path>,
    cache_bytes: u64,
) -> Result<Option<Arc<dyn Device>>, DeviceError> {
    Ok(open_links(&chain(path, header, image_dir)?, cache_bytes)?.map(|below| below.disk))
}

/// A backing file that is open, and its disk.
struct Below {
    disk: Arc<dyn Device>,
    file: Arc<io_uring::UringDevice>,
}

/// The first of these files, over the others; `None` if there is none.
fn open_links(links: &[Link], cache_bytes: u64) -> Result<Option<Below>, DeviceError> {
    // From the lowest file up: each is the backing device of the one before.
    let mut below: Option<Below> = None;
    for link in links.iter().rev() {
        let file = open_file(&link.path)?;
        let others = Others { backing: below.map(|below| below.disk), data_file: None };
        let disk = match link.is_raw {
            true => file.clone(),
            false => open_image(file.clone(), others, None, cache_bytes, false)?,
        };
        below = Some(Below { disk, file });
    }
    Ok(below)
}

/// The files that a commit needs.
pub struct CommitFiles {
    /// The images between the image and the target, the nearest to the image first: only read.
    pub between: Vec<Arc<dyn Device>>,
    /// The target, opened for writing, over the backing files below it, which are only read.
    pub target: Target,
}

/// Opens the files for a commit of the image at `path` to its nearest backing file, or to `base`.
/// That name is relative to the folder of the image over the file, as for QEMU. `None` if there is
/// no such backing file.
///
/// # Errors
/// As [`open_backing`]; when the target, or an image between, lacks writes of a server that was
/// killed.
pub fn open_for_commit(
    path: &Path,
    header: &Header,
    image_dir: Option<&Path>,
    base: Option<&Path>,
) -> Result<Option<CommitFiles>, DeviceError> {
    let links = chain(path, header, image_dir)?;
    let depth = match base {
        Some(base) => place_in(&links, path, base)?,
        None => 0,
    };
    let Some(link) = links.get(depth) else { return Ok(None) };
    let target = target(link, &links[depth + 1..])?;
    let open = |link: &Link| {
        let file: Arc<dyn Device> = open_file(&link.path)?;
        check_restored(&link.path, &read_header(file.clone())?)?;
        Ok::<_, DeviceError>(file)
    };
    let between = links[..depth].iter().map(open).collect::<Result<_, _>>()?;
    Ok(Some(CommitFiles { between, target }))
}

/// The place of the file `base` in the backing files of the image at `path`; behind all if it is
/// none of them.
fn place_in(links: &[Link], path: &Path, base: &Path) -> Result<usize, DeviceError> {
    let mut over = in_real_directory(path)?;
    for (place, link) in links.iter().enumerate() {
        let named = directory_of(&over, None).join(base).canonicalize();
        if named.is_ok_and(|named| named == link.path) {
            return Ok(place);
        }
        over.clone_from(&link.path);
    }
    Ok(links.len())
}

/// The file `link` over those `below`, opened for writing.
fn target(link: &Link, below: &[Link]) -> Result<Target, DeviceError> {
    let file = open_for_writing(&link.path)?;
    if link.is_raw {
        return Ok(Target::Raw(file));
    }
    check_restored(&link.path, &read_header(file.clone())?)?;
    let backing = open_links(below, DEFAULT_CACHE_BYTES)?.map(|below| below.disk);
    Ok(Target::Qcow2 { file, backing })
}

/// The directory that backing files must be in.
fn directory_of(file: &Path, image_dir: Option<&Path>) -> PathBuf {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    image_dir.or(parent).unwrap_or(Path::new(".")).to_owned()
}

/// A backing file.
pub struct Link {
    /// Its path, without symbolic links.
    pub path: PathBuf,
    /// Whether its format is raw; else it is qcow2.
    pub is_raw: bool,
}

/// Whether backing files are opened.
struct Follow(bool);

impl Value for Follow {
    fn expected() -> String {
        "none or auto".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Follow(false)),
            "auto" => Some(Follow(true)),
            _ => None,
        }
    }
}

/// The protocol in the name of a backing file, which QEMU opens with it.
pub fn protocol(name: &str) -> Option<&str> {
    // A slash before the first colon makes it a path.
    name.split_once(':').map(|(protocol, _)| protocol).filter(|protocol| !protocol.contains('/'))
}

/// The file that the image at `image` calls `name`, without symbolic links, if it is in
/// `directory`. An absolute name is allowed only if the user chose the directory.
fn resolve(image: &Path, name: &str, directory: &Path, may_be_absolute: bool) -> Result<PathBuf, String> {
    if let Some(protocol) = protocol(name) {
        return Err(format!("names with the protocol {protocol:?} are not opened"));
    }
    let path = Path::new(name);
    if path.has_root() && !may_be_absolute {
        return Err("an absolute name needs image-dir=".into());
    }
    if path.components().any(|part| part == Component::ParentDir) && !may_be_absolute {
        return Err(r#"a name with ".." needs image-dir="#.into());
    }
    let whole = image.parent().unwrap_or(Path::new("/")).join(path);
    let found = whole.canonicalize().map_err(|error| error.to_string())?;
    match found.starts_with(directory) {
        true => Ok(found),
        false => Err(format!("{} is outside of {}", found.display(), directory.display())),
    }
}

/// The path with a directory without symbolic links. The file may be a link: names are relative to
/// the link, as in QEMU.
fn in_real_directory(path: &Path) -> Result<PathBuf, DeviceError> {
    let failed = |error| DeviceError::new(path.display().to_string(), "cannot find the file").because(error);
    let directory = directory_of(path, None).canonicalize().map_err(failed)?;
    Ok(directory.join(path.file_name().unwrap_or_default()))
}

/// Device and inode: the same for every name of a file.
fn identity(path: &Path) -> Result<(u64, u64), DeviceError> {
    let failed = |error| DeviceError::new(path.display().to_string(), "cannot find the file").because(error);
    std::fs::metadata(path).map(|file| (file.dev(), file.ino())).map_err(failed)
}

fn open_file(path: &Path) -> Result<Arc<io_uring::UringDevice>, DeviceError> {
    let options = io_uring::Options { read_only: true, refuse_writers: true, ..io_uring::Options::new(path) };
    Ok(Arc::new(io_uring::UringDevice::open(&options)?))
}

/// Opens a file that this process may have open for writing.
fn open_shared(path: &Path) -> Result<Arc<io_uring::UringDevice>, DeviceError> {
    let options = io_uring::Options { read_only: true, ..io_uring::Options::new(path) };
    Ok(Arc::new(io_uring::UringDevice::open(&options)?))
}

fn open_for_writing(path: &Path) -> Result<Arc<io_uring::UringDevice>, DeviceError> {
    let options = io_uring::Options { refuse_writers: true, ..io_uring::Options::new(path) };
    Ok(Arc::new(io_uring::UringDevice::open(&options)?))
}

fn as_device_error(error: qcow2::Error) -> DeviceError {
    DeviceError::new(error.image, error.problem.to_string())
}

fn read_header(device: Arc<dyn Device>) -> Result<Header, DeviceError> {
    reactor::run(async move { Image::open_header(&*device).await }).map_err(as_device_error)
}

/// Opens an image for reading. `has_bitmaps`: the device has its dirty bitmaps, if they are valid.
fn open_image(
    device: Arc<dyn Device>,
    others: Others,
    snapshot: Option<String>,
    cache_bytes: u64,
    has_bitmaps: bool,
) -> Result<Arc<dyn Device>, DeviceError> {
    let opened = reactor::run(async move {
        let mut image = Image::open(device).await?;
        if let Some(name) = snapshot {
            image = image.at_snapshot(&name).await?;
        }
        if has_bitmaps && let Err(error) = image.load_bitmaps().await {
            tracing::warn!(%error, "the dirty bitmaps of an image are not served");
        }
        Qcow2::new(image, others, cache_bytes)
    });
    Ok(Arc::new(opened.map_err(as_device_error)?))
}

fn open_live(
    device: Arc<dyn Device>,
    others: Others,
    cache_bytes: u64,
    log: Option<RestartLog>,
) -> Result<Arc<LiveImage>, DeviceError> {
    let opened = reactor::run(async move {
        if let Some(repaired) = qcow2::recover(&device, log.as_ref()).await? {
            let (leaks, corruptions) = (repaired.leaks_fixed(), repaired.corruptions_fixed());
            let image = device.name();
            tracing::warn!(image, leaks, corruptions, "an image that was not closed was repaired");
        }
        Ok((Image::open(device).await?, log))
    });
    let (image, log) = opened.map_err(as_device_error)?;
    Ok(Arc::new(LiveImage::open(image, others, cache_bytes, log).map_err(as_device_error)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Role;

    fn options(text: &str) -> Result<Options, SpecError> {
        Options::parse(&Spec::parse(Role::Device, &[&KIND], text)?)
    }

    #[test]
    fn options_are_parsed_and_what_contradicts_is_refused() {
        let defaults = Options::new("/a.qcow2");
        assert_eq!(options("qcow2:file=/a.qcow2").unwrap(), defaults);
        let read_only = options("qcow2:file=/a.qcow2,readonly=on").unwrap();
        assert_eq!(read_only, Options { read_only: true, ..defaults.clone() });
        let is_writable = |text: &str| options(text).unwrap().is_writable();
        assert!(
            is_writable("qcow2:file=a")
                && !is_writable("qcow2:file=a,snapshot=s")
                && !read_only.is_writable()
        );
        let all = "qcow2:file=/a.qcow2,backing=auto,image-dir=/b,data=/c,snapshot=s,cache=1M,restart-log=/d";
        let expected = Options {
            follow: true,
            image_dir: Some("/b".into()),
            data: Some("/c".into()),
            snapshot: Some("s".into()),
            cache_bytes: 1 << 20,
            restart_logs: RestartLogs::In("/d".into()),
            ..defaults
        };
        assert_eq!(options(all).unwrap(), expected);
        let refusal = |text: &str| options(text).unwrap_err().to_string();
        assert!(refusal("qcow2:file=a,image-dir=/b").ends_with("image-dir= belongs to backing=auto"));
        assert!(refusal("qcow2:file=a,backing=all").contains("none or auto"));
        assert!(refusal("qcow2").contains("file"));
    }

    #[test]
    fn only_names_inside_the_directory_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let images = root.join("images");
        std::fs::create_dir_all(images.join("sub")).unwrap();
        for file in ["outside", "images/base", "images/sub/base"] {
            std::fs::write(root.join(file), "x").unwrap();
        }
        std::os::unix::fs::symlink("../outside", images.join("out")).unwrap();
        std::os::unix::fs::symlink("sub/base", images.join("in")).unwrap();
        let top = images.join("top");
        let with = |name: &str, may_be_absolute| resolve(&top, name, &images, may_be_absolute);
        assert_eq!(with("base", false).unwrap(), images.join("base"));
        assert_eq!(with("./sub/base", false).unwrap(), images.join("sub/base"));
        assert_eq!(with("in", false).unwrap(), images.join("sub/base"));
        let absolute = images.join("base").display().to_string();
        assert_eq!(with(&absolute, true).unwrap(), images.join("base"));
        assert_eq!(with("sub/../base", true).unwrap(), images.join("base"));
        assert!(with(&absolute, false).unwrap_err().contains("needs image-dir="));
        assert!(with("sub/../base", false).unwrap_err().contains("needs image-dir="));
        assert!(with("out", false).unwrap_err().contains("is outside of"));
        assert!(with("../outside", true).unwrap_err().contains("is outside of"));
        assert!(with("/etc/passwd", true).unwrap_err().contains("is outside of"));
        for name in ["json:{}", "nbd:localhost:10809", "file:base", "fat:rw:/"] {
            assert!(with(name, true).unwrap_err().contains("protocol"), "{name}");
        }
        assert!(with("missing", false).is_err());
    }
}
