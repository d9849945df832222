//! Numbers of the handshake. Source: the NBD protocol, "Handshake", "Option types", "Option reply
//! types", "Transmission flags".

/// `NBDMAGIC`, the first word of a server's greeting.
pub const GREETING: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the second word, and the magic of an option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The second word of servers from before 2009, without options.
pub const OLD_STYLE: u64 = 0x0000_4202_8186_1253;
/// The magic of a reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flag of either side: the fixed newstyle handshake.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
/// Handshake flag of either side: no zeroes follow the reply to [`OPT_EXPORT_NAME`].
pub const FLAG_NO_ZEROES: u16 = 1 << 1;
/// Number of these zeroes, for clients or servers without [`FLAG_NO_ZEROES`].
pub const PADDING: usize = 124;

/// Chooses an export; a server refuses by disconnecting.
pub const OPT_EXPORT_NAME: u32 = 1;
/// Ends the handshake.
pub const OPT_ABORT: u32 = 2;
/// Lists the exports.
pub const OPT_LIST: u32 = 3;
/// Starts TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Asks for information about an export.
pub const OPT_INFO: u32 = 6;
/// Chooses an export; the server answers.
pub const OPT_GO: u32 = 7;
/// Asks for structured replies.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// Lists metadata contexts.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Selects metadata contexts.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// Asks for extended headers.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// The protocol's name of an option.
pub fn option_name(option: u32) -> &'static str {
    match option {
        OPT_EXPORT_NAME => "NBD_OPT_EXPORT_NAME",
        OPT_ABORT => "NBD_OPT_ABORT",
        OPT_LIST => "NBD_OPT_LIST",
        OPT_STARTTLS => "NBD_OPT_STARTTLS",
        OPT_INFO => "NBD_OPT_INFO",
        OPT_GO => "NBD_OPT_GO",
        OPT_STRUCTURED_REPLY => "NBD_OPT_STRUCTURED_REPLY",
        OPT_LIST_META_CONTEXT => "NBD_OPT_LIST_META_CONTEXT",
        OPT_SET_META_CONTEXT => "NBD_OPT_SET_META_CONTEXT",
        OPT_EXTENDED_HEADERS => "NBD_OPT_EXTENDED_HEADERS",
        _ => "an unknown option",
    }
}

/// Success, or the end of the replies to an option.
pub const REP_ACK: u32 = 1;
/// An export of the list.
pub const REP_SERVER: u32 = 2;
/// Information about an export.
pub const REP_INFO: u32 = 3;
/// A metadata context.
pub const REP_META_CONTEXT: u32 = 4;
/// The bit of errors.
pub const REP_ERR: u32 = 1 << 31;
/// The server does not know the option.
pub const REP_ERR_UNSUP: u32 = REP_ERR + 1;
/// The option's data is invalid.
pub const REP_ERR_INVALID: u32 = REP_ERR + 3;
/// The server requires TLS.
pub const REP_ERR_TLS_REQD: u32 = REP_ERR + 5;
/// There is no such export.
pub const REP_ERR_UNKNOWN: u32 = REP_ERR + 6;
/// The option is too long.
pub const REP_ERR_TOO_BIG: u32 = REP_ERR + 9;
/// The option needs extended headers.
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERR + 10;

/// Information: size and transmission flags.
pub const INFO_EXPORT: u16 = 0;
/// Information: the export's name.
pub const INFO_NAME: u16 = 1;
/// Information: the export's description.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information: smallest and preferred block, longest payload.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// The metadata context that tells data from holes.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Transmission flag: the other flags are valid.
pub const FLAG_HAS_FLAGS: u16 = 1;
/// Transmission flag: the export takes no writes.
pub const FLAG_READ_ONLY: u16 = 1 << 1;
/// Transmission flag: flush.
pub const FLAG_SEND_FLUSH: u16 = 1 << 2;
/// Transmission flag: forced unit access.
pub const FLAG_SEND_FUA: u16 = 1 << 3;
/// Transmission flag: a rotating disk.
pub const FLAG_ROTATIONAL: u16 = 1 << 4;
/// Transmission flag: trim.
pub const FLAG_SEND_TRIM: u16 = 1 << 5;
/// Transmission flag: write zeroes.
pub const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
/// Transmission flag: reads whose reply must not be fragmented.
pub const FLAG_SEND_DF: u16 = 1 << 7;
/// Transmission flag: several connections share one cache.
pub const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
/// Transmission flag: cache.
pub const FLAG_SEND_CACHE: u16 = 1 << 10;
/// Transmission flag: write zeroes that are refused where they would be slow.
pub const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

/// Longest payload of a read or write that every server must accept, in bytes.
pub const MAX_PAYLOAD: u32 = 32 << 20;
