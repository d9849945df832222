//! Lines that attach clients: command lines, and text for configuration files.

use api::Attach;

/// Lines by program, in the making.
#[derive(Default)]
pub struct Lines(Attach);

impl Lines {
    /// Adds a text that is no command.
    pub fn add_text(&mut self, program: &str, text: String) {
        self.0.lines.insert(program.to_owned(), text);
    }

    /// Adds commands, or the options of one.
    pub fn add<C: AsRef<[A]>, A: AsRef<str>>(&mut self, program: &str, commands: impl AsRef<[C]>) {
        let command = |command: &C| command.as_ref().iter().map(|word| word.as_ref().to_owned()).collect();
        let argv: Vec<Vec<String>> = commands.as_ref().iter().map(command).collect();
        let line =
            |command: &Vec<String>| command.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        self.add_text(program, argv.iter().map(line).collect::<Vec<_>>().join("\n"));
        self.0.argv.insert(program.to_owned(), argv);
    }

    /// All lines.
    pub fn finish(self) -> Attach {
        self.0
    }
}

/// A word as a shell reads it.
pub fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=+.,:/@%?".contains(&byte);
    match !word.is_empty() && word.bytes().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// A text in a value of an option of QEMU: commas are doubled.
pub fn in_qemu(text: &str) -> String {
    text.replace(',', ",,")
}

/// A text in an attribute of XML, which has single quotes.
pub fn in_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

/// A text in a path or a query of a URI, where `/` and `,` stay.
pub fn in_uri(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:,".contains(&byte);
    let word = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(word).collect()
}

/// Descriptors of the virtqueue. A request has one for each page, and Linux makes no request that
/// the queue has no room for (`fs/fuse/virtio_fs.c`): under QEMU's default, 128, none of 1 MiB.
const VIRTIO_FS_QUEUE_SIZE: u16 = 1024;

/// Lines that attach a virtio-fs device with this `tag` to the server at `socket`, and mount it in
/// the guest. It has `queues` request queues, but one under libvirt, whose configuration has no
/// number of them. Neither QEMU's nor libvirt's lines connect again: a new server does not know the
/// guest's open files.
pub fn virtio_fs(socket: &str, tag: &str, queues: u16) -> Attach {
    let mut lines = Lines::default();
    let queue_size = VIRTIO_FS_QUEUE_SIZE;
    let id = format!("virtiofs-{tag}");
    let chardev = format!("socket,id={id},path={}", in_qemu(socket));
    let mut device = format!("vhost-user-fs-pci,chardev={id},tag={tag},queue-size={queue_size}");
    if queues > 1 {
        device += &format!(",num-request-queues={queues}");
    }
    let memory = "memory-backend-memfd,id=mem,size=MEMORY,share=on";
    let machine = ["-object", memory, "-machine", "memory-backend=mem"];
    lines.add("qemu", [[&machine[..], &["-chardev", &chardev, "-device", &device]].concat()]);
    let memory = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";
    lines.add_text("libvirt-domain", memory.to_owned());
    let filesystem = format!(
        "<filesystem type='mount'><driver type='virtiofs' queue='{queue_size}'/>\
         <source socket='{}'/><target dir='{}'/></filesystem>",
        in_xml(socket),
        in_xml(tag),
    );
    lines.add_text("libvirt-filesystem", filesystem);
    let fs = format!("tag={tag},socket={socket},num_queues={queues},queue_size={queue_size}");
    lines.add("cloud-hypervisor", [["--memory", "size=MEMORY,shared=on", "--fs", &fs]]);
    lines.add("mount", [["mount", "-t", "virtiofs", tag, &format!("/mnt/{tag}")]]);
    lines.add_text("fstab", format!("{tag} /mnt/{tag} virtiofs defaults,nofail 0 0"));
    lines.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_the_program_that_reads_them() {
        let Attach { lines, argv } = virtio_fs("/a b,c'/s<", "t", 1);
        let words = &argv["qemu"][0];
        assert_eq!(words[5], "socket,id=virtiofs-t,path=/a b,,c'/s<");
        assert!(lines["qemu"].contains(r"'socket,id=virtiofs-t,path=/a b,,c'\''/s<'"), "{}", lines["qemu"]);
        assert!(lines["libvirt-filesystem"].contains("<source socket='/a b,c&apos;/s&lt;'/>"));
        assert!(!argv.contains_key("fstab") && !argv.contains_key("libvirt-filesystem"));
    }

    #[test]
    fn every_hypervisor_shares_its_memory_and_gets_a_long_queue() {
        let Attach { lines, argv } = virtio_fs("/run/s", "home", 1);
        let qemu = "-object memory-backend-memfd,id=mem,size=MEMORY,share=on -machine memory-backend=mem \
                    -chardev socket,id=virtiofs-home,path=/run/s \
                    -device vhost-user-fs-pci,chardev=virtiofs-home,tag=home,queue-size=1024";
        assert_eq!(lines["qemu"], qemu);
        assert_eq!(
            lines["libvirt-filesystem"],
            "<filesystem type='mount'><driver type='virtiofs' queue='1024'/><source socket='/run/s'/>\
             <target dir='home'/></filesystem>"
        );
        assert!(lines["libvirt-domain"].contains("<access mode='shared'/>"));
        assert_eq!(
            lines["cloud-hypervisor"],
            "--memory size=MEMORY,shared=on --fs tag=home,socket=/run/s,num_queues=1,queue_size=1024"
        );
        assert_eq!(argv["mount"], [["mount", "-t", "virtiofs", "home", "/mnt/home"]]);
        assert_eq!(lines["fstab"], "home /mnt/home virtiofs defaults,nofail 0 0");
        let Attach { lines: many, .. } = virtio_fs("/run/s", "home", 4);
        assert_eq!(many["qemu"], format!("{qemu},num-request-queues=4"));
        assert!(many["cloud-hypervisor"].contains(",num_queues=4,"), "{}", many["cloud-hypervisor"]);
        assert_eq!(many["libvirt-filesystem"], lines["libvirt-filesystem"]);
    }
}
